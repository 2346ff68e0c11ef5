from __future__ import annotations

import pytest
import torch
from helpers import normal

from mutransformer.errors import ConfigError
from mutransformer.inference.sampling import Sampling, choose, distribution

V = 12
LOGITS = 2 * normal(3, V)


def by_loops(logits: list[float], s: Sampling) -> list[float]:
    """Probabilities by the definitions: temperature, then top-k, then nucleus, then min-p, each of what is left."""
    scaled = [logit / s.temperature for logit in logits]
    weights = torch.tensor(scaled, dtype=torch.float64).softmax(-1).tolist()
    order = sorted(range(len(logits)), key=lambda i: -weights[i])
    if s.top_k:
        order = order[: s.top_k]
    total, mass, nucleus = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if mass < s.top_p * total:
            nucleus.append(i)
        mass += weights[i]
    kept = [i for i in nucleus if weights[i] >= s.min_p * weights[order[0]]]
    left = sum(weights[i] for i in kept)
    return [weights[i] / left if i in kept else 0.0 for i in range(len(logits))]


def probabilities(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    weights_BV, ids_BV = distribution(logits_BV, sampling)
    return torch.zeros_like(weights_BV).scatter(1, ids_BV, weights_BV / weights_BV.sum(-1, keepdim=True))


@pytest.mark.parametrize("temperature", [1.0, 0.3, 5.0])
@pytest.mark.parametrize("top_k", [0, 1, 4, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.6, 0.05])
@pytest.mark.parametrize("min_p", [0.0, 0.2, 1.0])
def test_filters_combine_in_the_order_stated(temperature, top_k, top_p, min_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = torch.tensor([by_loops(row, sampling) for row in LOGITS.tolist()], dtype=torch.float64)
    assert torch.allclose(probabilities(LOGITS, sampling), expected, rtol=0, atol=1e-14)


def test_the_nucleus_is_that_of_what_top_k_left():
    """With the other order four tokens would be left: the nucleus of all has more than top_k takes off."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    kept = probabilities(logits, Sampling(top_k=2, top_p=0.5)) > 0
    assert kept.tolist() == [[True, False, False, False]]  # 0.4 of 0.7 is above a half


def test_draws_have_the_distribution():
    n = 4000
    sampling = Sampling(temperature=0.8, top_k=6, top_p=0.9)
    uniform = (
        torch.arange(n, dtype=torch.float64) + 0.5
    ) / n  # evenly: no chance, so the tolerance is one draw a token
    drawn = choose(LOGITS[:1].expand(n, V), sampling, uniform)
    shares = torch.bincount(drawn, minlength=V) / n
    assert torch.allclose(shares.double(), probabilities(LOGITS[:1], sampling)[0], rtol=0, atol=1.5 / n)


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24])
def test_the_ends_of_the_unit_interval_draw_what_is_kept(uniform):
    for row in LOGITS.float():
        for top_k in (1, 3, 0):
            kept = row.sort(descending=True).indices[: top_k or V].tolist()
            drawn = choose(row[None], Sampling(top_k=top_k), torch.tensor([uniform])).item()
            assert drawn == (kept[0] if uniform == 0 else kept[-1])


def test_temperature_0_is_the_likeliest_and_the_first_among_equals():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    assert choose(logits, Sampling(temperature=0), torch.tensor([0.99])).tolist() == [1]
    tiny = Sampling(temperature=1e-42, top_k=1)  # division overflows
    assert choose(logits, tiny, torch.tensor([0.99])).tolist() == [1]


def test_bfloat16_logits_are_drawn_from_in_float32():
    weights, _ = distribution(LOGITS.bfloat16(), Sampling())
    assert weights.dtype == torch.float32


@pytest.mark.parametrize(
    "changed",
    [
        *({"temperature": value} for value in (-1.0, float("nan"), float("inf"))),
        *({"top_p": value} for value in (0.0, -0.1, 1.1, float("nan"))),
        *({"min_p": value} for value in (-0.1, 1.1, float("nan"))),
        {"top_k": -1},
    ],
    ids=str,
)
def test_a_value_out_of_range_is_named(changed):
    with pytest.raises(ConfigError, match=next(iter(changed))):
        Sampling(**changed)
