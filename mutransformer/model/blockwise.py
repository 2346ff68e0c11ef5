"""Causal softmax attention in bfloat16 on CPU, a block of queries at a time.

torch's fused kernel takes twice as long there: in its small pieces it does not reach the processor's matrix units. Here
scores of a block that caches hold are made by large products, in the forward pass and once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_BLOCK = 128  # queries; keys after a block's last query are left out
_N_SCORES = 2**18  # of a block, 1 MB in float32


def blockwise_attention(q_BHLK: torch.Tensor, k_BHLK: torch.Tensor, v_BHLK: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale q k^T) v over the keys up to each query; scores and weights are never whole.

    Args:
        q_BHLK: queries.
        k_BHLK: keys, as many heads.
        v_BHLK: values.
        scale: factor on the scores.
    Returns:
        out_BHLK; products and their results in the arguments' dtype, softmax in float32 or wider.
    """
    return _BlockwiseAttention.apply(q_BHLK, k_BHLK, v_BHLK, scale)


def _blocks(q_BHLK: torch.Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """(sequences, queries, keys) of each block."""
    n_rows, n_head, length, _ = q_BHLK.shape
    n_together = max(1, _N_SCORES // (n_head * min(length, _BLOCK) * length))
    for row in range(0, n_rows, n_together):
        for start in range(0, length, _BLOCK):
            stop = min(length, start + _BLOCK)
            yield slice(row, row + n_together), slice(start, stop), slice(0, stop)


def _weights(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """weights_BHLM of the last L of M positions, in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) * scale) @ k.to(wide).mT
    length = q.shape[2]
    scores[..., -length:] += torch.full((length, length), float("-inf"), dtype=wide, device=q.device).triu_(1)
    return scores.softmax(-1)


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    out = torch.empty_like(q)
    for rows, queries, keys in _blocks(q):
        weights = _weights(q[rows, :, queries], k[rows, :, keys], scale)
        out[rows, :, queries] = weights.to(v.dtype) @ v[rows, :, keys]
    return out


def _backward(
    gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, queries, keys in _blocks(q):
        of_out, of_queries, of_keys = gradient[rows, :, queries], q[rows, :, queries], k[rows, :, keys]
        weights = _weights(of_queries, of_keys, scale)
        of_weights = (of_out @ v[rows, :, keys].mT).to(wide)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, wide).mul_(scale).to(q.dtype)
        grad_q[rows, :, queries] = of_scores @ of_keys
        grad_k[rows, :, keys] += of_scores.mT @ of_queries
        grad_v[rows, :, keys] += weights.to(v.dtype).mT @ of_out
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


# the same as operators that torch.compile leaves whole: it would write out every block
_forward_operator = torch.library.custom_op("mutransformer::blockwise", _forward, mutates_args=())
_forward_operator.register_fake(lambda q, k, v, scale: torch.empty_like(q))
_backward_operator = torch.library.custom_op("mutransformer::blockwise_backward", _backward, mutates_args=())
_backward_operator.register_fake(
    lambda gradient, q, k, v, scale: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
)


class _BlockwiseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        return (_forward_operator if torch.compiler.is_compiling() else _forward)(q, k, v, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        backward = _backward_operator if torch.compiler.is_compiling() else _backward
        q, k, v = ctx.saved_tensors
        return *backward(gradient, q, k, v, ctx.scale), None
