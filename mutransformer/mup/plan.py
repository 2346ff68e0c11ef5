"""The plan: one row a parameter, computed from the settings without touching a weight.

Initialization, optimizer groups, checks, sharding and `mutransformer describe` all read these rows. The rules behind
them are in `rules.py`, the names and axes in `roles.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mutransformer.errors import ConfigError
from mutransformer.mup import rules
from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig
from mutransformer.mup.roles import Kind, TensorSpec, UnclaimedParameterError


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """All that is decided about one parameter.

    Args:
        name: the parameter's name in the decoder.
        role: its role.
        shape: sizes, `n_layer` first where there is one slice a layer.
        axes: logical axis of each dimension.
        fan_in: values summed into one output.
        fan_out: outputs.
        width_multiple: fan-in (embedding, biases, gains: fan-out) over that of the base width.
        init_mean: mean of the initialization.
        init_std: standard deviation of the initialization.
        forward_multiplier: factor on the product with this tensor in the forward pass.
        lr: learning rate at the peak of the schedule.
        weight_decay: the setting, after the role's multiplier.
        decay_per_step: share of the weight that is taken off in a step at the peak.
        eps: Adam's eps.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    fan_in: int
    fan_out: int
    width_multiple: float
    init_mean: float
    init_std: float
    forward_multiplier: float
    lr: float
    weight_decay: float
    decay_per_step: float
    eps: float

    @property
    def count(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The rows, and the scalars of the forward pass that belong to no parameter.

    Args:
        rows: one a parameter, in the decoder's order.
        logits_multiplier: factor on the logits (output multiplier, times 1/width in form B and when tied).
        residual_multiplier: factor on what each block adds to the residual stream.
        qk_scale: factor on attention scores.
        warnings: settings under which hyperparameters are not known to transfer, a sentence each.
    """

    rows: tuple[PlanRow, ...]
    logits_multiplier: float
    residual_multiplier: float
    qk_scale: float
    warnings: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of weights in all."""
        return sum(row.count for row in self.rows)

    def by_name(self, names: Iterable[str]) -> dict[str, PlanRow]:
        """The row of each parameter in `names`, which must be exactly the plan's.

        Raises:
            UnclaimedParameterError: a name that no row claims, or a row that no name claims.
        """
        by_name = {row.name: row for row in self.rows}
        names = list(names)
        for name in names:
            if name not in by_name:
                raise UnclaimedParameterError(
                    f"parameter {name!r} has no role: add it to TENSORS in mutransformer/mup/roles.py "
                    f"(planned: {', '.join(by_name)})"
                )
        for name in by_name:
            if name not in names:
                raise UnclaimedParameterError(f"the plan has parameter {name!r}, the model does not")
        return by_name


def build_plan(
    tensors: Iterable[TensorSpec],
    *,
    sizes: Mapping[str, int],
    multiples: Mapping[str, float],
    n_layer: int,
    is_tied: bool,
    parametrization: ParametrizationConfig,
    optimizer: OptimizerConfig,
) -> Plan:
    """Applies the rules to each parameter.

    Args:
        tensors: parameters of the model, in order.
        sizes: logical axis -> size.
        multiples: logical axis -> size over that of the base width, by real division; 1 where it does not grow.
        n_layer: depth.
        is_tied: the embedding also serves as the unembedding.
        parametrization: rule set and multipliers.
        optimizer: base learning rate, decay and eps.
    Returns:
        The plan, without warnings (the caller knows the architecture).
    Raises:
        ConfigError: the algorithm has no known rule under this rule set.
    """
    key = (optimizer.algorithm, parametrization.rules)
    if key not in rules.LR_WIDTH_RULES:
        known = ", ".join(rule for algorithm, rule in rules.LR_WIDTH_RULES if algorithm == optimizer.algorithm)
        raise ConfigError(
            "model.parametrization.rules",
            parametrization.rules,
            f"has no learning-rate rule for {optimizer.algorithm}",
            f"use one of {known}",
        )
    if parametrization.depth_rule == "completep" and optimizer.algorithm == "sgd":
        raise ConfigError("model.parametrization.depth_rule", "completep", "is derived for Adam", "use none with sgd")
    width_rule = rules.LR_WIDTH_RULES[key]
    depth_multiple = n_layer / (parametrization.n_base_layer or n_layer)
    logits_multiplier = parametrization.output_multiplier
    rows = []
    for spec in tensors:
        fans = rules.Fans(
            role=spec.role,
            kind=spec.kind,
            fan_in=math.prod(sizes[axis] for axis in spec.fan_in_axes),
            fan_out=math.prod(sizes[axis] for axis in spec.fan_out_axes),
            fan_in_multiple=math.prod(multiples[axis] for axis in spec.fan_in_axes),
            fan_out_multiple=math.prod(multiples[axis] for axis in spec.fan_out_axes),
            depth_multiple=depth_multiple if spec.is_in_block else 1.0,
            is_tied=is_tied,
        )
        forward = {
            "embedding": parametrization.input_multiplier,
            "unembedding": parametrization.output_multiplier * rules.unembedding_forward(fans, parametrization),
        }.get(spec.name, 1.0)
        if spec.name == "unembedding":
            logits_multiplier = forward
        elif spec.name == "embedding" and is_tied:
            logits_multiplier *= rules.unembedding_forward(fans, parametrization)
        has_fan_in = spec.kind in (Kind.HIDDEN, Kind.OUTPUT)
        width_factor = width_rule(fans, parametrization)
        lr = (
            optimizer.learning_rate
            * width_factor
            * rules.lr_depth_factor(fans, parametrization)
            * parametrization.lr_multiplier[spec.role]
        )
        weight_decay = optimizer.weight_decay * parametrization.weight_decay_multiplier[spec.role]
        rows.append(
            PlanRow(
                name=spec.name,
                role=spec.role.value,
                shape=tuple(sizes[axis] for axis in spec.axes),
                axes=spec.axes,
                fan_in=fans.fan_in,
                fan_out=fans.fan_out,
                width_multiple=fans.fan_in_multiple if has_fan_in else fans.fan_out_multiple,
                init_mean=rules.init_mean(fans),
                init_std=rules.init_std(fans, parametrization),
                forward_multiplier=forward,
                lr=lr,
                weight_decay=weight_decay,
                decay_per_step=rules.decay_per_step(weight_decay, lr, optimizer),
                eps=optimizer.eps
                * (width_factor if optimizer.scale_eps else 1.0)
                * rules.eps_depth_factor(fans, parametrization),
            )
        )
    return Plan(
        rows=tuple(rows),
        logits_multiplier=logits_multiplier,
        residual_multiplier=rules.residual_factor(depth_multiple, parametrization),
        qk_scale=rules.qk_scale(sizes["head_dim"], parametrization),
    )
