from __future__ import annotations

import pytest

from mutransformer.model.axes import ACTIVATIONS
from mutransformer.mup.roles import TENSORS
from mutransformer.xla.layout import spec_of
from mutransformer.xla.mesh import MeshShape

MESH = MeshShape(rows=4, cols=2)
SIZES = {
    "layers": 3, "vocab": 100, "embed": 64, "heads": 8, "kv_heads": 4, "head_dim": 8, "mlp": 256,
    "batch": 16, "length": 16, "keys": 16, "gathered": 64, "scalar": 1,
}  # fmt: skip

# mu_transformer's layout, read off its source: axes of each tensor in our order of dimensions, N for not cut
PARAMETERS = {
    "embedding": "NY",
    "unembedding": "NY",
    "w_query": "NYNX",
    "w_key": "NYNX",
    "w_value": "NYNX",
    "w_attention_out": "NXYN",
    "w_ff_in": "NYX",
    "w_ff_gate": "NYX",
    "w_ff_out": "NXY",
    "b_query": "NYN",
    "gain_attention": "NY",
    "gain_final": "Y",
    "gain_query": "NN",
    "b_unembedding": "N",
    "b_ff_in": "NY",
    "b_ff_out": "NY",
}
ACTIVATION_SPECS = {
    "residual": "XNY",
    "attention_input": "XNY",
    "query": "XYNN",
    "key_rotated": "XYNN",
    "scores": "XYNN",
    "weights": "XYNN",
    "attention_mixed": "XYNN",
    "feedforward_hidden": "XNY",
    "logits": "XNN",
}


def spec(axes, shard_vocab=False, **sizes):
    found = spec_of(axes, [{**SIZES, **sizes}[axis] for axis in axes], MESH, shard_vocab)
    return "".join(to or "N" for to in found)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_lie_as_in_the_reference(name):
    assert spec(TENSORS[name].axes) == PARAMETERS[name]


@pytest.mark.parametrize("name", ACTIVATION_SPECS)
def test_activations_lie_as_in_the_reference(name):
    assert spec(ACTIVATIONS[name][-1]) == ACTIVATION_SPECS[name]


def test_one_key_value_head_is_whole_and_its_matrix_cut_over_rows_alone():
    assert spec(TENSORS["w_key"].axes, kv_heads=1) == "NNNX"
    assert spec(ACTIVATIONS["key"][0], kv_heads=1) == "XNNN"


def test_vocabulary_can_be_cut_over_rows():
    assert spec(TENSORS["embedding"].axes, shard_vocab=True) == "XY"
    assert spec(TENSORS["b_unembedding"].axes, shard_vocab=True) == "X"
    assert spec(ACTIVATIONS["logits"][0], shard_vocab=True) == "XNN"  # rows have the batch already


def test_no_mesh_axis_is_used_twice_in_a_tensor():
    for axes in (
        *(tensor.axes for tensor in TENSORS.values()),
        *(axes for marks in ACTIVATIONS.values() for axes in marks),
    ):
        for shard_vocab in (False, True):
            cut = spec(axes, shard_vocab).replace("N", "")
            assert len(set(cut)) == len(cut), axes
