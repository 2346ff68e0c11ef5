from __future__ import annotations

import pytest
import torch
from helpers import normal, random_tokens
from torch.utils._python_dispatch import TorchDispatchMode

from mutransformer.model import loss
from mutransformer.model.linear import linear
from mutransformer.model.loss import cross_entropy_sum, linear_cross_entropy_sum

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


# From the stream to the loss without the logits

X_BLD, WEIGHT_VD, BIAS_V = normal(3, 5, 6, seed=1), normal(17, 6, seed=2), normal(17, seed=3)


@pytest.mark.parametrize("n_logits", [1, 4 * 17, 10**6])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("mask", [None, torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]])])
def test_in_chunks_of_any_size_the_same_loss_and_gradients(monkeypatch, n_logits, with_bias, mask):
    monkeypatch.setattr(loss, "_CHUNK", {"cpu": n_logits})
    monkeypatch.setattr(loss, "_MIN_ROWS", 1)

    def by(function):
        leaves = [tensor.clone().requires_grad_() for tensor in (X_BLD, WEIGHT_VD, BIAS_V)[: 3 if with_bias else 2]]
        value = function(*leaves) / 7
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    ours = by(lambda x, w, b=None: linear_cross_entropy_sum(x, w, b, TARGETS_BL, mask))
    whole = by(lambda x, w, b=None: cross_entropy_sum(linear(x, w, b), TARGETS_BL, mask))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(ours, whole, strict=True))


def test_no_tensor_is_as_large_as_the_logits(monkeypatch):
    monkeypatch.setattr(loss, "_CHUNK", {"cpu": 100})
    monkeypatch.setattr(loss, "_MIN_ROWS", 1)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    with Sizes():
        x, weight = X_BLD.clone().requires_grad_(), WEIGHT_VD.clone().requires_grad_()
        linear_cross_entropy_sum(x, weight, None, TARGETS_BL).backward()
    assert largest <= max(100, WEIGHT_VD.numel()) < TARGETS_BL.numel() * 17


def test_an_evaluation_computes_no_gradient():
    sums = []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is torch.ops.aten.zeros.default:
                sums.append(out.shape)
            return out

    weight = torch.nn.Parameter(WEIGHT_VD)
    for evaluates in (True, False):
        sums.clear()
        with Sums(), torch.set_grad_enabled(not evaluates):
            linear_cross_entropy_sum(X_BLD, weight, None, TARGETS_BL)
        assert (WEIGHT_VD.T.shape in sums) is not evaluates


def test_in_bfloat16_the_gradient_of_the_weight_adds_up_in_the_masters_dtype(monkeypatch):
    x, weight = X_BLD.bfloat16().requires_grad_(), WEIGHT_VD.float().requires_grad_()
    value = linear_cross_entropy_sum(x, weight, None, TARGETS_BL)
    value.backward()
    assert (value.dtype, x.grad.dtype, weight.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    exact = WEIGHT_VD.clone().requires_grad_()
    cross_entropy_sum(X_BLD @ exact.T, TARGETS_BL).backward()
    assert (weight.grad - exact.grad).norm() < 0.01 * exact.grad.norm()
