"""The scaling rules: one pure function a quantity, from a tensor's fans to its numbers. Read by `plan.py` alone.

Sources: Tensor Programs V (arXiv 2203.03466) Table 3 and Table 8, App. B.1; Lingle (arXiv 2404.05728); CompleteP
(arXiv 2505.01618). `docs/parametrization.md` has the same as a table, checked against this file by a test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig
from mutransformer.mup.roles import Kind, Role

RESIDUAL_OUTPUTS = (Role.ATTENTION_OUTPUT, Role.FEEDFORWARD_OUT)


@dataclass(frozen=True, kw_only=True)
class Fans:
    """What the rules may know of a tensor.

    Args:
        role: its role.
        kind: how it grows with width.
        fan_in: number of values summed into one output.
        fan_out: number of outputs.
        fan_in_multiple: fan_in over that of the base width, by real division.
        fan_out_multiple: fan_out over that of the base width, by real division.
        depth_multiple: n_layer over the base depth for a tensor in a residual block, else 1.
        is_tied: whether the embedding also serves as the unembedding.
    """

    role: Role
    kind: Kind
    fan_in: int
    fan_out: int
    fan_in_multiple: float
    fan_out_multiple: float
    depth_multiple: float = 1.0
    is_tied: bool = False


def init_mean(fans: Fans) -> float:
    """Mean of the initialization: 1 for gains, else 0."""
    return 1.0 if fans.role is Role.GAIN else 0.0


def init_std(fans: Fans, config: ParametrizationConfig) -> float:
    """Standard deviation of the Gaussian initialization."""
    if fans.kind is Kind.VECTOR:
        return 0.0
    if fans.kind is Kind.INPUT:
        return config.embedding_init_std
    if fans.kind is Kind.OUTPUT:
        init = config.unembedding_init or ("sp" if config.rules == "sp" else "mup")
        form_a = {"mup": fans.fan_in**-1.0, "sp": fans.fan_in**-0.5, "zero": 0.0}[init]
        return form_a / unembedding_forward(fans, config)
    is_zero = (fans.role is Role.QUERY and config.query_init == "zero") or (
        fans.role in RESIDUAL_OUTPUTS and config.residual_init == "zero"
    )
    return 0.0 if is_zero else fans.fan_in**-0.5


def unembedding_forward(fans: Fans, config: ParametrizationConfig) -> float:
    """The width's share of the logits' multiplier: 1 / width multiple in form B and for tied embeddings, else 1.

    `fans` are those of the unembedding, or of the embedding where it is tied (its fan-out is then what is summed over).
    """
    if config.rules == "sp" or not (fans.is_tied or config.unembedding_form == "B"):
        return 1.0
    return 1.0 / (fans.fan_out_multiple if fans.is_tied else fans.fan_in_multiple)


def _adam_mup(fans: Fans, config: ParametrizationConfig) -> float:
    if fans.kind is Kind.INPUT and config.embedding_lr_rule == "sqrt":
        return fans.fan_out_multiple**-0.5
    if fans.kind is Kind.HIDDEN or (fans.kind is Kind.OUTPUT and config.unembedding_form == "A"):
        return 1.0 / fans.fan_in_multiple
    return 1.0


def _adam_mup_absolute(fans: Fans, config: ParametrizationConfig) -> float:
    return 1.0 / fans.fan_in if fans.kind in (Kind.HIDDEN, Kind.OUTPUT) else 1.0


def _sgd_mup(fans: Fans, config: ParametrizationConfig) -> float:
    if fans.kind is Kind.HIDDEN:
        return fans.fan_out_multiple / fans.fan_in_multiple
    if fans.kind is Kind.OUTPUT:
        return 1.0 / fans.fan_in_multiple if config.unembedding_form == "A" else fans.fan_in_multiple
    return fans.fan_out_multiple


def _unscaled(fans: Fans, config: ParametrizationConfig) -> float:
    return 1.0


WidthRule = Callable[[Fans, ParametrizationConfig], float]

# (algorithm, rule set) -> learning rate factor from width; a pair that is not here has no known rule
LR_WIDTH_RULES: Mapping[tuple[str, str], WidthRule] = {
    ("adamw", "mup"): _adam_mup,
    ("adamw", "mup_absolute"): _adam_mup_absolute,
    ("adamw", "sp"): _unscaled,
    ("lion", "mup"): _adam_mup,
    ("lion", "mup_absolute"): _adam_mup_absolute,
    ("lion", "sp"): _unscaled,
    ("sgd", "mup"): _sgd_mup,
    ("sgd", "sp"): _unscaled,
}


def lr_depth_factor(fans: Fans, config: ParametrizationConfig) -> float:
    """CompleteP: learning rate of tensors in residual blocks times m_N^(alpha - 1)."""
    return fans.depth_multiple ** (config.depth_alpha - 1) if config.depth_rule == "completep" else 1.0


def eps_depth_factor(fans: Fans, config: ParametrizationConfig) -> float:
    """CompleteP: eps of tensors in residual blocks times m_N^-alpha, as their gradients shrink by that."""
    return fans.depth_multiple**-config.depth_alpha if config.depth_rule == "completep" else 1.0


def residual_factor(depth_multiple: float, config: ParametrizationConfig) -> float:
    """Factor on what a block adds to the residual stream: the user's multiplier, times m_N^-alpha under CompleteP."""
    depth = depth_multiple**-config.depth_alpha if config.depth_rule == "completep" else 1.0
    return config.residual_multiplier * depth


def qk_scale(d_head: int, config: ParametrizationConfig) -> float:
    """Factor on attention scores: a constant while d_head is fixed; 1/d_head for muP, 1/sqrt(d_head) for SP."""
    if config.qk_scale is not None:
        return config.qk_scale
    return d_head**-0.5 if config.rules == "sp" else 1.0 / d_head


def decay_per_step(weight_decay: float, lr: float, config: OptimizerConfig) -> float:
    """Share of a weight that decay takes off in a step at the peak of the schedule."""
    if lr == 0:
        return 0.0
    return weight_decay if config.decay == "independent" else lr * weight_decay
