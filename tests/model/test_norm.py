from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import normal

from mutransformer.model.norm import rms_norm


@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("n_gains", [None, 1, 6])
def test_equals_torchs_rms_norm_forward_and_backward(eps, n_gains):
    x = normal(2, 3, 6).requires_grad_()
    gain = None if n_gains is None else normal(n_gains, seed=1)
    full_gain = None if gain is None else gain.expand(6)
    ours, theirs = rms_norm(x, eps, gain), F.rms_norm(x, (6,), full_gain, eps)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-14)
    weight = normal(2, 3, 6, seed=2)
    gradients = [torch.autograd.grad((out * weight).sum(), x)[0] for out in (ours, theirs)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-13)


def test_statistics_of_bfloat16_are_taken_in_float32():
    x = (100 * normal(4, 1000)).bfloat16()
    ours = rms_norm(x, 1e-5)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, rms_norm(x.float(), 1e-5).bfloat16())
    coarse = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    assert not torch.equal(ours, coarse)


def test_a_zero_vector_stays_zero_and_has_a_finite_gradient():
    x = torch.zeros(1, 4, requires_grad=True)
    out = rms_norm(x, 1e-5)
    out.sum().backward()
    assert not out.any()
    assert torch.isfinite(x.grad).all()
