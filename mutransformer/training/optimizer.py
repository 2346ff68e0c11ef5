"""From the plan to an optimizer: one named group a parameter; torch's own algorithms where it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from mutransformer.mup.config import OptimizerConfig
from mutransformer.mup.plan import Plan, PlanRow
from mutransformer.training.packed import MOMENT_DTYPES, PackedOptimizer


def param_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], plan: Plan, config: OptimizerConfig
) -> list[dict[str, Any]]:
    """One optimizer group a parameter, named after it, with the plan's learning rate, decay and eps.

    Independent decay is handed to torch as weight_decay / peak learning rate, so that what a step takes off,
    lr(t) times that, is s(t) weight_decay. A parameter whose learning rate is 0 is frozen: it does not decay either.

    Raises:
        UnclaimedParameterError: a parameter that no row claims, by name; or a row without a parameter.
    """
    parameters = dict(named_parameters)
    rows = plan.by_name(parameters)
    return [
        {"name": name, "params": [parameter], "lr": rows[name].lr, **_decay_and_eps(rows[name], config)}
        for name, parameter in parameters.items()
    ]


def _decay_and_eps(row: PlanRow, config: OptimizerConfig) -> dict[str, float]:
    decay = {"weight_decay": row.decay_per_step / row.lr if row.lr else 0.0}
    return {**decay, "eps": row.eps} if config.algorithm == "adamw" else decay


def build_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], plan: Plan, config: OptimizerConfig
) -> Optimizer:
    """The optimizer of the plan: torch's own where it has one, a packed one on XLA and for a bfloat16 first moment.

    Raises:
        UnclaimedParameterError: names and rows differ.
    """
    groups = param_groups(named_parameters, plan, config)
    moment_dtype = MOMENT_DTYPES[config.first_moment]
    is_compiled = any(p.device.type == "xla" for group in groups for p in group["params"])
    if not is_compiled and (moment_dtype is None or config.algorithm == "sgd"):
        return _BUILDERS[config.algorithm](groups, config)
    if config.algorithm == "sgd":
        return PackedOptimizer(_decay_of_sgd(groups, config), "sgd", {"momentum": config.momentum})
    return PackedOptimizer(groups, config.algorithm, {"betas": (config.beta1, config.beta2)}, moment_dtype)


class Lion(Optimizer):
    """Lion: sign((1 - beta1) g + beta1 m), then m = beta2 m + (1 - beta2) g; decay as in AdamW.

    Args:
        params: parameter groups with `lr` and `weight_decay`.
        betas: (beta1, beta2), each in [0, 1).
    Source:
        arXiv 2302.06675, Algorithm 2.
    """

    def __init__(self, params: Any, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": 1e-4, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = _call(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"].lerp(p.grad, 1 - beta1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 1 - beta2)
        return loss


class DecoupledSGD(SGD):
    """torch's SGD whose decay, `lr * decoupled_decay`, is taken off the weight and not put into the momentum."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = _call(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["decoupled_decay"])
        super().step()
        return loss


def _call(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _adamw(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    # fused: one pass over each tensor on CPU and GPU; same bits in every run
    return AdamW(groups, betas=(config.beta1, config.beta2), fused=True)


def _lion(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    return Lion(groups, betas=(config.beta1, config.beta2))


def _sgd(groups: list[dict[str, Any]], config: OptimizerConfig) -> Optimizer:
    kind = SGD if config.decay == "coupled" else DecoupledSGD
    return kind(_decay_of_sgd(groups, config), lr=config.learning_rate, momentum=config.momentum)


def _decay_of_sgd(groups: list[dict[str, Any]], config: OptimizerConfig) -> list[dict[str, Any]]:
    """The groups with their decay under the name that keeps it out of the gradient, unless it is coupled."""
    if config.decay == "independent":
        for group in groups:
            group["decoupled_decay"] = group.pop("weight_decay")
    return groups


_BUILDERS: Mapping[str, Callable[[list[dict[str, Any]], OptimizerConfig], Optimizer]] = {
    "adamw": _adamw,
    "lion": _lion,
    "sgd": _sgd,
}


@torch.no_grad()
def clip_by_global_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float | None) -> torch.Tensor:
    """Scales all gradients by max_norm / norm where their joint norm exceeds max_norm.

    Unlike torch's clip_grad_norm_ there is no 1e-6 in the denominator: the clipped norm is max_norm itself.

    Args:
        parameters: those with a gradient count.
        max_norm: None: measure only.
    Returns:
        The norm before clipping, a scalar on the gradients' device.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm is not None:
        factor = torch.clamp(max_norm / norm, max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
    return norm
