from __future__ import annotations

from collections import Counter

import pytest
import torch
from helpers import make_decoder, random_tokens, small

from mutransformer.model.loss import cross_entropy_sum
from mutransformer.model.tap import is_recording, recording, tap

ONCE = {"embedding", "logits"}
EACH_LAYER = {
    "attention_input",
    "query",
    "key",
    "value",
    "query_rotated",
    "key_rotated",
    "scores",
    "weights",
    "attention_mixed",
    "attention_output",
    "feedforward_input",
    "feedforward_hidden",
    "feedforward_activation",
    "feedforward_output",
    "residual",
}


def recorded(config):
    seen = []
    with recording(lambda name, tensor: seen.append((name, tensor))):
        make_decoder(config)(random_tokens(2))
    return seen


@pytest.mark.parametrize(
    "settings, added, removed",
    [
        ({}, set(), set()),
        ({"activation": "swiglu"}, {"feedforward_gate"}, set()),
        ({"rotary_base": 0.0}, set(), {"query_rotated", "key_rotated"}),
        ({"attention_activation": "sqrelu"}, set(), set()),
    ],
)
def test_what_is_recorded_and_how_often(settings, added, removed):
    counts = Counter(name for name, _ in recorded(small(n_layer=3, **settings)))
    assert counts == {**dict.fromkeys(ONCE, 1), **dict.fromkeys((EACH_LAYER | added) - removed, 3)}


def test_recorded_tensors_are_detached_and_of_the_forward_pass():
    config = small()
    seen = dict(recorded(config))
    assert not any(tensor.requires_grad for tensor in seen.values())
    assert torch.equal(seen["logits"], make_decoder(config)(random_tokens(2)))
    assert seen["scores"].shape == (2, 2, 8, 8)
    assert torch.allclose(seen["weights"].sum(-1), torch.ones((), dtype=torch.float64))


@pytest.mark.parametrize("attention_activation", ["softmax", "elu"])
def test_recording_leaves_loss_and_gradients_as_they_are_to_the_bit(attention_activation):
    tokens = random_tokens(2, 9)

    def loss_and_gradients():
        decoder = make_decoder(small(attention_activation=attention_activation), dtype=torch.float32)
        loss = cross_entropy_sum(decoder(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        return [loss.detach(), *(p.grad for p in decoder.parameters())]

    plain = loss_and_gradients()
    with recording(lambda name, tensor: None):
        watched = loss_and_gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_recorders_nest_and_end_with_their_block_even_on_an_error():
    outer, inner = [], []
    with recording(lambda name, tensor: outer.append(name)):
        tap("embedding", torch.ones(1, 1, 1))
        with pytest.raises(KeyError), recording(lambda name, tensor: inner.append(name)):
            tap("residual", torch.ones(1, 1, 1))
            raise KeyError
        tap("query", torch.ones(1, 1, 1))
    tap("logits", torch.ones(1, 1, 1))
    assert (outer, inner, is_recording()) == (["embedding", "query"], ["residual"], False)
