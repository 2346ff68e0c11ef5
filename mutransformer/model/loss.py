"""Cross-entropy in float32, summed so that the caller decides what it is averaged over."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from mutransformer.model.linear import product

# Logits that are held at a time. On CPU 16 MB in float32, which caches hold: softmax over them takes a third of the
# time. A device with memory of its own wants large products. Fewer rows than _MIN_ROWS would have the sum of the
# weight's gradients, as large as the weight, take longer than the products that it sums.
_CHUNK = {"cpu": 2**22}
_LARGE_CHUNK = 2**26
_MIN_ROWS = 128


def cross_entropy_sum(
    logits_BLV: torch.Tensor, targets_BL: torch.Tensor, mask_BL: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum of -log p(target) over the positions that count, in nats.

    Args:
        logits_BLV: any floating dtype; the loss is computed in float32 or wider.
        targets_BL: token ids.
        mask_BL: 1 where a target counts, 0 where it does not; None: all count.
    Returns:
        Scalar.
    """
    logits = logits_BLV.flatten(0, 1).to(torch.promote_types(logits_BLV.dtype, torch.float32))
    if mask_BL is None:
        return F.cross_entropy(logits, targets_BL.flatten(), reduction="sum")
    terms = F.cross_entropy(logits, targets_BL.flatten(), reduction="none")
    return (terms * mask_BL.flatten()).sum()


def linear_cross_entropy_sum(
    x_BLD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_BL: torch.Tensor,
    mask_BL: torch.Tensor | None = None,
) -> torch.Tensor:
    """`cross_entropy_sum` of the logits x weight^T + bias, which are never whole.

    They are made a few rows at a time, and the gradients at once with them: memory does not grow with the tokens, and
    nothing is computed twice.

    Args:
        x_BLD: products are computed in its dtype, the loss in float32 or wider.
        weight_VD: in the masters' dtype, which its gradient has too.
        bias_V: likewise, or None.
        targets_BL: token ids.
        mask_BL: 1 where a target counts, 0 where it does not; None: all count.
    Returns:
        Scalar.
    """
    mask = None if mask_BL is None else mask_BL.flatten()
    if not torch.is_grad_enabled():  # which a Function is not told: it would make gradients that nobody takes
        x_BLD, weight_VD, bias_V = x_BLD.detach(), weight_VD.detach(), None if bias_V is None else bias_V.detach()
    return _LinearCrossEntropy.apply(x_BLD.flatten(0, 1), weight_VD, bias_V, targets_BL.flatten(), mask)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        at_use = weight.to(x.dtype)
        n_rows = max(_MIN_ROWS, _CHUNK.get(x.device.type, _LARGE_CHUNK) // len(weight))
        total = torch.zeros((), dtype=wide, device=x.device)
        of_x, of_weight, of_bias, _, _ = ctx.needs_input_grad
        grad_x = torch.empty_like(x) if of_x else None
        # transposed: the shape in which both CPU and GPU multiply fast
        grad_weight = torch.zeros(x.shape[1], len(weight), dtype=weight.dtype, device=x.device) if of_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None and of_bias else None
        for start in range(0, len(x), n_rows):
            rows = slice(start, start + n_rows)
            logits = product(x[rows], at_use)
            if bias is not None:
                logits = logits + bias.to(x.dtype)
            log_p = logits.to(wide).log_softmax(-1)
            index = targets[rows, None]
            terms = log_p.gather(1, index).squeeze(1)
            total -= (terms if mask is None else terms * mask[rows]).sum()
            if not any(ctx.needs_input_grad):
                continue
            gradient = log_p.exp_().scatter_add_(1, index, log_p.new_full((), -1).expand(index.shape))
            if mask is not None:
                gradient *= mask[rows, None]
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
            gradient = gradient.to(x.dtype)
            if grad_x is not None:
                grad_x[rows] = product(gradient, at_use.t())
            if grad_weight is not None:
                grad_weight += product(x[rows].t(), gradient.t())
        ctx.save_for_backward(grad_x, None if grad_weight is None else grad_weight.t(), grad_bias)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*(None if g is None else (g * gradient).to(g.dtype) for g in ctx.saved_tensors), None, None)
