"""Nonlinearities by name, elementwise.

The ELU family is written out: torch_xla 2.9.0 computes wrong gradients for torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

# arXiv 1706.02515, equation 14
_SELU_ALPHA = 1.6732632423543772
_SELU_SCALE = 1.0507009873554805


def elu(x: torch.Tensor) -> torch.Tensor:
    """x above zero, e^x - 1 below."""
    return torch.where(x > 0, x, torch.expm1(x.clamp(max=0)))


def selu(x: torch.Tensor) -> torch.Tensor:
    """1.0507 x above zero, 1.0507 * 1.6733 (e^x - 1) below."""
    return _SELU_SCALE * torch.where(x > 0, x, _SELU_ALPHA * torch.expm1(x.clamp(max=0)))


def swiglu(gate: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """silu(gate) * hidden (arXiv 2002.05202)."""
    return _SwiGLU.apply(gate, hidden)


class _SwiGLU(torch.autograd.Function):
    """Keeps its arguments for the backward pass and computes silu(gate), a third tensor of their size, again."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, hidden)
        return F.silu(gate) * hidden

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, hidden = ctx.saved_tensors
        return torch.ops.aten.silu_backward(gradient * hidden, gate), gradient * F.silu(gate)


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sqrelu": lambda h: F.relu(h).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": elu,
    "selu": selu,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "celu": elu,  # with its alpha of 1 the same function
    "mish": F.mish,
    "hard_tanh": F.hardtanh,
    "hard_sigmoid": F.hardsigmoid,
    "hard_silu": F.hardswish,
    "log_sigmoid": F.logsigmoid,
    "soft_sign": F.softsign,
    "squareplus": lambda h: (h + (h.square() + 4).sqrt()) / 2,
}
