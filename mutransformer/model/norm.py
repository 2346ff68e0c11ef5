"""RMSNorm, with or without a learned gain."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, eps: float, gain: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, times the gain.

    Args:
        x: any shape, last dimension normalized; statistics in float32 or wider whatever the dtype.
        eps: added to the mean square.
        gain: broadcast over the last dimension, or None.
    Returns:
        Same shape and dtype as x.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if gain is None else normed * gain
