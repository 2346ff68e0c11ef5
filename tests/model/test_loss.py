from __future__ import annotations

import torch
from helpers import normal, random_tokens

from mutransformer.model.loss import cross_entropy_sum

LOGITS_BLV = normal(3, 5, 17)
TARGETS_BL = random_tokens(3, 5)


def by_loops(mask_BL: torch.Tensor) -> float:
    total = 0.0
    for b in range(3):
        for position in range(5):
            logits = LOGITS_BLV[b, position]
            log_p = logits[TARGETS_BL[b, position]] - logits.exp().sum().log()
            total -= float(log_p) * float(mask_BL[b, position])
    return total


def test_sum_over_all_positions():
    ours = cross_entropy_sum(LOGITS_BLV, TARGETS_BL)
    assert ours.dtype == torch.float64
    assert abs(float(ours) - by_loops(torch.ones(3, 5))) < 1e-12


def test_only_positions_under_the_mask_count():
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    for dtype in (torch.int64, torch.bool, torch.float32):
        assert abs(float(cross_entropy_sum(LOGITS_BLV, TARGETS_BL, mask.to(dtype))) - by_loops(mask)) < 1e-12


def test_masked_positions_have_no_gradient():
    logits = LOGITS_BLV.clone().requires_grad_()
    mask = torch.ones(3, 5)
    mask[1, 2] = 0
    cross_entropy_sum(logits, TARGETS_BL, mask).backward()
    assert not logits.grad[1, 2].any()
    assert logits.grad.any(-1).sum() == 14


def test_bfloat16_logits_give_a_float32_loss():
    logits = LOGITS_BLV.bfloat16()
    ours = cross_entropy_sum(logits, TARGETS_BL)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, cross_entropy_sum(logits.float(), TARGETS_BL))
    coarse = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TARGETS_BL.flatten(), reduction="sum")
    assert float(ours) != float(coarse)
