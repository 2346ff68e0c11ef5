from __future__ import annotations

import pytest
from helpers import mup, small

from mutransformer.errors import ConfigError


@pytest.mark.parametrize(
    "settings, field, rule",
    [
        ({"d_model": 20}, "d_model", r"must be a multiple of d_head=8; use 16 or 24$"),
        ({"d_model": 4}, "d_model", r"must be a multiple of d_head=8; use 8$"),
        ({"d_model": 0}, "d_model", r"must be above zero"),
        ({"d_model": 32, "n_kv_head": 3}, "n_kv_head", r"must divide n_head=4 .*; use one of 1, 2, 4$"),
        ({"n_kv_head": 4}, "n_kv_head", r"must divide n_head=2"),
        ({"n_kv_head": 0}, "n_kv_head", r"must be above zero"),
        ({"n_layer": 0}, "n_layer", r"must be above zero"),
        ({"vocab_size": 0}, "vocab_size", r"must be above zero"),
        ({"norm_eps": 0.0}, "norm_eps", r"must be above zero"),
        ({"ff_multiple": 0.01}, "ff_multiple", r"gives a feed-forward width of 0"),
        ({"rotary_base": -1.0}, "rotary_base", r"must not be negative"),
        ({"d_model": 15, "d_head": 5}, "d_head", r"must be even with rotary positions; use 6, or .*rotary_base=0$"),
    ],
)
def test_a_shape_that_cannot_work_is_refused_with_field_value_and_remedy(settings, field, rule):
    with pytest.raises(ConfigError, match=rf"^model.decoder.{field}={settings[field]}: {rule}") as error:
        small(**settings)
    assert "\n" not in str(error.value)


def test_an_odd_head_is_fine_without_positions():
    assert small(d_model=15, d_head=5, rotary_base=0.0).n_head == 3


@pytest.mark.parametrize("n_kv_head, resolved", [(None, 4), (1, 1), (2, 2), (4, 4)])
def test_number_of_key_value_heads(n_kv_head, resolved):
    assert small(d_model=32, n_kv_head=n_kv_head).n_kv_head_ == resolved


@pytest.mark.parametrize("ff_multiple, d_ff", [(4.0, 64), (8 / 3, 42), (0.99, 15)])
def test_feedforward_width_is_cut_to_an_integer(ff_multiple, d_ff):
    assert small(ff_multiple=ff_multiple).d_ff == d_ff


@pytest.mark.parametrize(
    "settings, added, removed",
    [
        ({"activation": "swiglu"}, {"w_ff_gate"}, set()),
        ({"tie_embeddings": True}, set(), {"unembedding"}),
        ({"norm_gains": "vector"}, {"gain_attention", "gain_feedforward", "gain_final"}, set()),
        ({"embedding_norm": True, "qk_norm": True}, set(), set()),
        (
            {"embedding_norm": True, "qk_norm": True, "norm_gains": "scalar"},
            {"gain_embedding", "gain_query", "gain_key", "gain_attention", "gain_feedforward", "gain_final"},
            set(),
        ),
        (
            {"projection_biases": True},
            {"b_query", "b_key", "b_value", "b_attention_out", "b_ff_in", "b_ff_out", "b_unembedding"},
            set(),
        ),
        (
            {"projection_biases": True, "activation": "swiglu", "tie_embeddings": True},
            {"w_ff_gate", "b_query", "b_key", "b_value", "b_attention_out"}
            | {"b_ff_in", "b_ff_gate", "b_ff_out", "b_unembedding"},
            {"unembedding"},
        ),
    ],
)
def test_parameters_of_a_shape(settings, added, removed):
    plain = {spec.name for spec in small().tensors()}
    assert {spec.name for spec in small(**settings).tensors()} == (plain | added) - removed


def test_scalar_gains_are_one_value_and_vector_gains_one_a_feature():
    def gain_sizes(norm_gains):
        config = small(norm_gains=norm_gains, qk_norm=True)
        sizes = config.axis_sizes()
        return {spec.name: sizes[spec.axes[-1]] for spec in config.tensors() if spec.name.startswith("gain")}

    assert set(gain_sizes("scalar").values()) == {1}
    assert gain_sizes("vector") == {
        "gain_attention": 16,
        "gain_feedforward": 16,
        "gain_final": 16,
        "gain_query": 8,
        "gain_key": 8,
    }


def test_axes_that_grow_with_width():
    multiples = small(d_model=24, n_kv_head=3, ff_multiple=2.0).width_multiples(mup(ff_multiple_base=4.0))
    assert {axis for axis, multiple in multiples.items() if multiple == 1} == {"layers", "vocab", "head_dim", "one"}
    assert {multiples[axis] for axis in ("embed", "heads", "kv_heads")} == {1.5}
    assert multiples["mlp"] == 48 / 64
