"""RMSNorm, with or without a learned gain."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable


def rms_norm(x: torch.Tensor, eps: float, gain: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, times the gain.

    Args:
        x: any shape, last dimension normalized; statistics in float32 or wider whatever the dtype.
        eps: added to the mean square.
        gain: broadcast over the last dimension, or None.
    Returns:
        Same shape and dtype as x.
    """
    normed = _RMSNorm.apply(x, eps)
    return normed if gain is None else normed * gain


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number a row for the backward pass, where torch would keep three more tensors of x's size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        scale = (norm.square() / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, scale)
        return (x * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, scale = ctx.saved_tensors
        normed = x * scale
        along = (normed * gradient).mean(-1, keepdim=True)
        return ((gradient - normed * along) * scale).to(x.dtype), None
