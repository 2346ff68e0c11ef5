from __future__ import annotations

import time

import pytest
import torch
from helpers import make_decoder, normal, random_tokens, small

from mutransformer.model.linear import ONEDNN, contract, linear, product
from mutransformer.model.loss import cross_entropy_sum

TOKENS = random_tokens(2, 9)


def loss_and_gradients(**changes):
    decoder = make_decoder(small(n_layer=3, **changes), dtype=torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        loss = cross_entropy_sum(decoder(TOKENS[:, :-1]), TOKENS[:, 1:])
    loss.backward()
    return [loss.detach(), *(p.grad for p in decoder.parameters())], sum(saved)


@pytest.mark.parametrize("remat", ["block", "dots"])
@pytest.mark.parametrize("changes", [{}, {"activation": "swiglu", "n_kv_head": 1}, {"attention_activation": "elu"}])
def test_rematerialization_changes_memory_and_no_bit(remat, changes):
    plain, n_plain = loss_and_gradients(**changes)
    found, n_found = loss_and_gradients(remat=remat, **changes)
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    assert n_found < (0.5 if remat == "block" else 0.9) * n_plain


@pytest.mark.parametrize("n_summed", [1, 2])
def test_linear_sums_over_the_last_dimensions(n_summed):
    x, weight = normal(2, 3, 4, 5), normal(6, 7, *(4, 5)[2 - n_summed :], seed=1)
    bias = normal(6, 7, seed=2)
    letters = "abst,hkst->abhk" if n_summed == 2 else "abst,hkt->abshk"
    expected = torch.einsum(letters, x, weight) + bias
    assert torch.allclose(linear(x, weight, bias, n_summed), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("layout", ["rows", "columns", "with gaps", "expanded", "three dimensions"])
def test_float32_products_and_their_gradients_whatever_the_layout(layout):
    x, weight = {
        "rows": lambda: (normal(5, 4), normal(3, 4, seed=1)),
        "columns": lambda: (normal(4, 5).T, normal(4, 3, seed=1).T),
        "with gaps": lambda: (normal(5, 9)[:, ::2][:, :4], normal(3, 9, seed=1)[:, 2:6]),
        "expanded": lambda: (normal(5, 1).expand(5, 4), normal(1, 4, seed=1).expand(3, 4)),
        "three dimensions": lambda: (normal(2, 5, 4), normal(3, 4, seed=1)),
    }[layout]()
    gradient = normal(1, seed=2).expand(*x.shape[:-1], 3)
    found, exact = [], []
    for dtype, results in ((torch.float32, found), (torch.float64, exact)):
        a, b = x.to(dtype).detach().requires_grad_(), weight.to(dtype).detach().requires_grad_()
        out = product(a, b)
        results += [out.detach(), *torch.autograd.grad(out, (a, b), gradient.to(dtype))]
    assert all(
        f.dtype == torch.float32 and torch.allclose(f.double(), e, atol=1e-5) for f, e in zip(found, exact, strict=True)
    )


def test_a_float32_product_of_slices_is_not_left_to_a_slow_path():
    if not ONEDNN:
        pytest.skip("products are torch's own here")
    x, whole = normal(256, 64).float(), normal(256, 512).float()
    taken = []
    for weight in (whole[:, :64].contiguous(), whole[:, 64:128]):
        times = []
        for _ in range(5):
            start = time.process_time()
            product(x, weight)
            times.append(time.process_time() - start)
        taken.append(min(times))
    assert taken[1] < 100 * taken[0]  # some thousand times, were the slice handed on as it is


def test_contraction_and_its_gradients():
    from mutransformer.model.linear import _contract  # what runs on XLA, here on the CPU

    a, b = normal(2, 3, 4, 5).requires_grad_(), normal(2, 3, 6, 5, seed=1).requires_grad_()
    assert torch.equal(contract("bhlk,bhmk->bhlm", a, b), torch.einsum("bhlk,bhmk->bhlm", a, b))
    assert torch.autograd.gradcheck(lambda a, b: _contract("bhlk,bhmk->bhlm", a, b), (a, b))
    torch.library.opcheck(_contract, ("bhlk,bhmk->bhlm", a, b))
