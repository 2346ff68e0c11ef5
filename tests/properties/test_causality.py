"""No logit may depend on a later token, whatever the attention; it does depend on every earlier one."""

from __future__ import annotations

import pytest
import torch
from helpers import make_decoder, normal, small

L = 6
TOKENS = torch.arange(L)[None]  # all different: a row of the embedding belongs to one position

ATTENTIONS = [
    {},
    {"n_kv_head": 2},
    {"n_kv_head": 1},
    {"rotary_base": 0.0},
    {"qk_norm": True, "embedding_norm": True, "activation": "swiglu"},
] + [
    {"attention_activation": activation, "attention_normalization": normalization}
    for activation in ("sqrelu", "elu")
    for normalization in ("length", "causal_count", "sum")
]


def influence(settings: dict, compute_dtype: torch.dtype | None = None) -> torch.Tensor:
    """[L, L]: largest derivative of the logits at a position (row) by the embedding at another (column)."""
    decoder = make_decoder(small(d_model=32, n_layer=3, **settings), qk_scale=1.0)
    decoder.compute_dtype = compute_dtype
    logits = decoder(TOKENS)[0] * normal(17)
    rows = [torch.autograd.grad(logits[i].sum(), decoder.embedding, retain_graph=True)[0] for i in range(L)]
    return torch.stack(rows)[:, :L].abs().amax(-1)


@pytest.mark.parametrize("settings", ATTENTIONS, ids=str)
def test_logits_depend_on_all_earlier_positions_and_on_no_later_one(settings):
    table = influence(settings)
    assert not table.triu(1).any()
    assert (table.tril() + torch.ones(L, L).triu(1) > 0).all()


def test_in_bfloat16_too():
    assert not influence({}, torch.bfloat16).triu(1).any()


@pytest.mark.parametrize("attention_activation", ["softmax", "elu"])
def test_logits_of_a_prefix_are_those_of_the_whole(attention_activation):
    decoder = make_decoder(small(attention_activation=attention_activation))
    whole = decoder(TOKENS)
    for length in range(1, L):
        assert torch.allclose(decoder(TOKENS[:, :length]), whole[:, :length], rtol=0, atol=1e-13)
