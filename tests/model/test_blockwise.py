from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import normal

from mutransformer.model import blockwise
from mutransformer.model.blockwise import blockwise_attention


def with_gradients(function, *arguments):
    leaves = [argument.detach().clone().requires_grad_() for argument in arguments]
    out = function(*leaves)
    weight = normal(*out.shape, seed=9).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weight)]


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)


def ours(q, k, v):
    return blockwise_attention(q, k, v, 0.3)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
@pytest.mark.parametrize("n_scores", [1, 60, 10**6])
def test_the_same_as_the_fused_kernel_forward_and_backward(monkeypatch, length, n_scores):
    monkeypatch.setattr(blockwise, "_BLOCK", 4)
    monkeypatch.setattr(blockwise, "_N_SCORES", n_scores)
    qkv = [normal(3, length, 2, 8, seed=seed).transpose(1, 2) for seed in range(3)]
    found, expected = with_gradients(ours, *qkv), with_gradients(fused, *qkv)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", [1, 4])
def test_in_bfloat16_as_exact_as_the_fused_kernel(size):
    qkv = [(size * normal(1, 2, 200, 64, seed=seed)).bfloat16() for seed in range(3)]
    exact = with_gradients(fused, *(tensor.double() for tensor in qkv))
    for a, b, e in zip(with_gradients(ours, *qkv), with_gradients(fused, *qkv), exact, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - e).norm() < 1.5 * (b.double() - e).norm()
