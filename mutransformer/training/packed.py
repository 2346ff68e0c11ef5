"""Optimizers for engines that compile the step: numbers that change from step to step come as one small tensor.

A learning rate written into a graph as a number is compiled anew when it is exactly 0 or 1, and costs a transfer each
otherwise; here the learning rates and bias corrections of all groups are packed into one tensor a step. Groups and
state are those of torch's optimizers, so that a checkpoint goes from one engine to another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

Group = Mapping[str, Any]
State = dict[str, Any]

# how the first moment may be kept; the update is computed in the masters' dtype whatever it is
MOMENT_DTYPES: Mapping[str, torch.dtype | None] = {"same": None, "bfloat16": torch.bfloat16}


def _adamw(p: torch.Tensor, gradient: torch.Tensor, state: State, group: Group, numbers: torch.Tensor) -> None:
    """torch's AdamW, arXiv 1711.05101: numbers are the learning rate and the two bias corrections."""
    lr, correction1, correction2 = numbers.unbind()
    beta1, beta2 = group["betas"]
    mean = state["exp_avg"].to(p.dtype).lerp(gradient, 1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    state["exp_avg"].copy_(mean)
    update = (mean / correction1) / ((square / correction2).sqrt() + group["eps"])
    p.copy_(p * (1 - lr * group["weight_decay"]) - lr * update)


def _lion(p: torch.Tensor, gradient: torch.Tensor, state: State, group: Group, numbers: torch.Tensor) -> None:
    """Lion, arXiv 2302.06675, Algorithm 2."""
    lr = numbers[0]
    beta1, beta2 = group["betas"]
    mean = state["exp_avg"].to(p.dtype)
    update = mean.lerp(gradient, 1 - beta1).sign()
    state["exp_avg"].copy_(mean.lerp(gradient, 1 - beta2))
    p.copy_(p * (1 - lr * group["weight_decay"]) - lr * update)


def _sgd(p: torch.Tensor, gradient: torch.Tensor, state: State, group: Group, numbers: torch.Tensor) -> None:
    """torch's SGD, with coupled decay (`weight_decay`) or decay taken off the weight (`decoupled_decay`)."""
    lr = numbers[0]
    if group["weight_decay"]:
        gradient = gradient + group["weight_decay"] * p
    if group["momentum"]:
        # torch starts the buffer at the first gradient; from a buffer of zeros that is the same
        gradient = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
    p.copy_(p * (1 - lr * group.get("decoupled_decay", 0.0)) - lr * gradient)


# what torch's optimizers keep in their groups besides, so that they find their own in a checkpoint of ours
_TORCHS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
              "fused": True, "decoupled_weight_decay": True},
    "lion": {},
    "sgd": {"dampening": 0, "nesterov": False, "maximize": False, "foreach": None, "differentiable": False,
            "fused": None},
}  # fmt: skip

# algorithm -> (update, its buffers, of which the first is the first moment)
_ALGORITHMS: Mapping[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "adamw": (_adamw, ("exp_avg", "exp_avg_sq")),
    "lion": (_lion, ("exp_avg",)),
    "sgd": (_sgd, ("momentum_buffer",)),
}


class PackedOptimizer(Optimizer):
    """AdamW, Lion or SGD with their state made at once and one transfer of numbers a step.

    Args:
        groups: as `optimizer.param_groups` makes them.
        algorithm: a key of `_ALGORITHMS`.
        defaults: `betas`, or `momentum`.
        moment_dtype: dtype of the first moment (adamw, lion); None: the parameter's.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        algorithm: str,
        defaults: dict[str, Any],
        moment_dtype: torch.dtype | None = None,
    ) -> None:
        self.algorithm = algorithm
        self._update, self._buffers = _ALGORITHMS[algorithm]
        self._has_steps = algorithm == "adamw"
        self._moment_dtype = None if algorithm == "sgd" else moment_dtype
        super().__init__(groups, {"weight_decay": 0.0, **_TORCHS[algorithm], **defaults})
        for group in self.param_groups:
            buffers = self._buffers if group.get("momentum", True) else ()
            for p in group["params"]:
                self.state[p] = {
                    name: torch.zeros_like(p, dtype=self._dtype_of(name, p), memory_format=torch.preserve_format)
                    for name in buffers
                }
                if self._has_steps:
                    self.state[p]["step"] = torch.tensor(0.0)

    def _dtype_of(self, buffer: str, p: torch.Tensor) -> torch.dtype:
        is_first_moment = buffer == self._buffers[0]
        return self._moment_dtype if is_first_moment and self._moment_dtype else p.dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # a parameter may move to another device after the optimizer was made: ask the first that has a gradient
        work = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not work:
            return loss
        first = work[0][0]
        numbers = torch.tensor([self._numbers(p, group) for p, group in work], dtype=first.dtype)
        rows = numbers.to(first.device).unbind(0)
        for (p, group), row in zip(work, rows, strict=True):
            self._update(p, p.grad.to(p.dtype), self.state[p], group, row)  # type: ignore[union-attr]
        return loss

    def _numbers(self, p: torch.Tensor, group: Group) -> tuple[float, float, float]:
        """The learning rate and Adam's bias corrections of the step that is made now."""
        if not self._has_steps:
            return group["lr"], 1.0, 1.0
        step = self.state[p]["step"]
        step += 1
        n = step.item()
        beta1, beta2 = group["betas"]
        return group["lr"], 1 - beta1**n, 1 - beta2**n

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which casts every buffer to the parameter's dtype: the first moment goes back to its own."""
        super().load_state_dict(state_dict)
        for p, state in self.state.items():
            for name, value in state.items():
                if name == "step":
                    state[name] = value.to("cpu", torch.float32)
                elif value is not None:
                    state[name] = value.to(self._dtype_of(name, p))
