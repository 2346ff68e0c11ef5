"""Cross-entropy in float32, summed so that the caller decides what it is averaged over."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
