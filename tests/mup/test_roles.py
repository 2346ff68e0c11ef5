from __future__ import annotations

import dataclasses

import pytest
from helpers import small

from mutransformer.mup.config import RoleMultipliers
from mutransformer.mup.roles import ROLE_KIND, TENSORS, Kind, Role

EVERYTHING = small(activation="swiglu", norm_gains="vector", embedding_norm=True, qk_norm=True, projection_biases=True)


def test_some_decoder_has_every_tensor_of_the_table():
    assert [spec.name for spec in EVERYTHING.tensors()] == list(TENSORS)


def test_every_role_is_used_has_a_kind_and_a_multiplier():
    roles = set(Role)
    assert {spec.role for spec in TENSORS.values()} == roles
    assert set(ROLE_KIND) == roles
    assert {field.name for field in dataclasses.fields(RoleMultipliers)} == {role.value for role in roles}


# What is summed over and what comes out, written down from the equations of the forward pass: q = x W_q and so on.
@pytest.mark.parametrize(
    "name, kind, fan_in_axes, fan_out_axes",
    [
        ("embedding", Kind.INPUT, ("vocab",), ("embed",)),
        ("w_query", Kind.HIDDEN, ("embed",), ("heads", "head_dim")),
        ("w_key", Kind.HIDDEN, ("embed",), ("kv_heads", "head_dim")),
        ("w_value", Kind.HIDDEN, ("embed",), ("kv_heads", "head_dim")),
        ("w_attention_out", Kind.HIDDEN, ("heads", "head_dim"), ("embed",)),
        ("w_ff_in", Kind.HIDDEN, ("embed",), ("mlp",)),
        ("w_ff_gate", Kind.HIDDEN, ("embed",), ("mlp",)),
        ("w_ff_out", Kind.HIDDEN, ("mlp",), ("embed",)),
        ("unembedding", Kind.OUTPUT, ("embed",), ("vocab",)),
        ("b_query", Kind.VECTOR, (), ("heads", "head_dim")),
        ("b_unembedding", Kind.VECTOR, (), ("vocab",)),
        ("gain_query", Kind.VECTOR, (), ("head_dim",)),
        ("gain_final", Kind.VECTOR, (), ("embed",)),
    ],
)
def test_fans_of(name, kind, fan_in_axes, fan_out_axes):
    spec = TENSORS[name]
    assert (spec.kind, spec.fan_in_axes, spec.fan_out_axes) == (kind, fan_in_axes, fan_out_axes)


def test_a_tensor_is_in_a_block_exactly_if_it_is_stacked_over_layers():
    outside = {name for name, spec in TENSORS.items() if not spec.is_in_block}
    assert outside == {"embedding", "gain_embedding", "gain_final", "unembedding", "b_unembedding"}
    assert all(spec.axes[0] == "layers" for spec in TENSORS.values() if spec.is_in_block)
