"""Rotary positions in half-split form (arXiv 2104.09864; halves as in GPT-NeoX)."""

from __future__ import annotations

from typing import Any

import torch


def rotary_table(positions: torch.Tensor, d_head: int, base: float, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines of position * base^(-i / (d_head / 2)).

    Args:
        positions: positions_BL or positions_L, integer.
        d_head: even width of a head.
        base: base of the frequencies.
        dtype: of the result; computed in float32 or wider.
    Returns:
        [2, ..., L, d_head / 2]: cosines, then sines.
    """
    wide = torch.promote_types(dtype, torch.float32)
    half = d_head // 2
    exponent = torch.arange(half, device=positions.device, dtype=wide) / half
    radians = positions.to(wide)[..., None] * torch.pow(base, -exponent)
    return torch.stack((radians.cos(), radians.sin())).to(dtype)


def rotate(x_BHLK: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotates each pair (first half, second half) by its position's angle.

    Args:
        x_BHLK: queries or keys.
        table: from `rotary_table`, [2, L, K / 2] or, with positions of their own for each sequence, [2, B, L, K / 2].
    Returns:
        out_BHLK, same dtype.
    """
    cos, sin = table.unsqueeze(-3) if table.dim() == 4 else table
    return _Rotation.apply(x_BHLK, cos, sin)


class _Rotation(torch.autograd.Function):
    """Keeps nothing but the table for the backward pass, which rotates back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(gradient, cos, -sin), None, None
