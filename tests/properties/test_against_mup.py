"""Our plan against microsoft/mup (the package `mup`), the rules' first implementation, on the same shapes."""

from __future__ import annotations

import math

import mup
import pytest
import torch
from helpers import rows_of, small
from torch import nn

from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig

D_BASE, D_HEAD, VOCAB = 16, 8, 17
FF_MULTIPLE = 3.0
WIDTHS = pytest.mark.parametrize("d_model", [16, 24, 64], ids=["1x", "1.5x", "4x"])
LR = 0.01


class Shapes(nn.Module):
    """One layer's parameters as mup wants them: width-like dimensions in separate matrices, a MuReadout at the end."""

    def __init__(self, d_model: int):
        super().__init__()
        d_ff = int(FF_MULTIPLE * d_model)
        self.embedding = nn.Embedding(VOCAB, d_model)
        self.query, self.key, self.value = (nn.Linear(d_model, d_model) for _ in range(3))
        self.attention_out = nn.Linear(d_model, d_model)
        self.ff_in, self.ff_out = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)
        self.gain, self.gain_query = nn.Parameter(torch.ones(d_model)), nn.Parameter(torch.ones(D_HEAD))
        self.unembedding = mup.MuReadout(d_model, VOCAB)


# our parameter -> mup's
SAME = {
    "embedding": "embedding.weight",
    "w_query": "query.weight",
    "w_key": "key.weight",
    "w_value": "value.weight",
    "w_attention_out": "attention_out.weight",
    "w_ff_in": "ff_in.weight",
    "w_ff_out": "ff_out.weight",
    "unembedding": "unembedding.weight",
    "b_query": "query.bias",
    "b_key": "key.bias",
    "b_value": "value.bias",
    "b_attention_out": "attention_out.bias",
    "b_ff_in": "ff_in.bias",
    "b_ff_out": "ff_out.bias",
    "b_unembedding": "unembedding.bias",
    "gain_attention": "gain",
    "gain_feedforward": "gain",
    "gain_final": "gain",
    "gain_query": "gain_query",
    "gain_key": "gain_query",
}


def theirs(d_model: int) -> Shapes:
    """The shapes with mup's base shapes; `delta` says which dimensions are widths where base and target agree."""
    torch.manual_seed(0)
    return mup.set_base_shapes(Shapes(d_model), Shapes(D_BASE), delta=Shapes(2 * D_BASE))


def ours(d_model: int, form: str = "B", **optimizer):
    decoder = small(
        d_model=d_model,
        n_layer=1,
        ff_multiple=FF_MULTIPLE,
        projection_biases=True,
        norm_gains="vector",
        qk_norm=True,
    )
    parametrization = ParametrizationConfig(d_base=D_BASE, unembedding_form=form)
    return rows_of(decoder, parametrization, OptimizerConfig(learning_rate=LR, **optimizer))


def mup_groups(model: Shapes, make_optimizer, **settings) -> dict[str, dict]:
    """mup's optimizer group of each of our parameters."""
    optimizer = make_optimizer(model.parameters(), lr=LR, **settings)
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    return {name: groups[model.get_parameter(other)] for name, other in SAME.items()}


def test_every_parameter_is_compared():
    assert set(SAME) == set(ours(16))
    assert set(SAME.values()) == {name for name, _ in Shapes(16).named_parameters()}


@WIDTHS
@pytest.mark.parametrize(
    "algorithm, make_optimizer", [("adamw", mup.MuAdam), ("adamw", mup.MuAdamW), ("sgd", mup.MuSGD)]
)
def test_learning_rates_are_mups(algorithm, make_optimizer, d_model):
    groups = mup_groups(theirs(d_model), make_optimizer)
    expected = {name: group["lr"] for name, group in groups.items()}
    rows = ours(d_model, algorithm=algorithm)
    assert {name: row.lr for name, row in rows.items()} == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("algorithm, make_optimizer", [("adamw", mup.MuAdamW), ("sgd", mup.MuSGD)])
def test_only_the_unembedding_differs_in_form_a(algorithm, make_optimizer):
    groups = mup_groups(theirs(64), make_optimizer)
    rows = ours(64, form="A", algorithm=algorithm)
    differing = {name for name, group in groups.items() if group["lr"] != pytest.approx(rows[name].lr, rel=1e-12)}
    assert differing == {"unembedding"}


@WIDTHS
def test_learning_rate_times_decay_is_our_independent_decay(d_model):
    """mup divides a matrix's learning rate by the width and multiplies its decay by it: AdamW takes off lr * decay at
    any width. So does our independent form, which leaves the learning rate out of it too: the settings are equal where
    ours is lr * mup's. Vectors are decayed by mup; ours leaves biases and gains alone unless told otherwise."""
    groups = mup_groups(theirs(d_model), mup.MuAdamW, weight_decay=0.1)
    rows = ours(d_model, weight_decay=0.1 * LR)
    matrices = {name for name in SAME if not name.startswith(("b_", "gain_"))}
    for name in matrices:
        assert groups[name]["lr"] * groups[name]["weight_decay"] == pytest.approx(rows[name].decay_per_step, rel=1e-12)
    assert {groups[name]["weight_decay"] for name in set(SAME) - matrices} == {0.1}
    assert {rows[name].decay_per_step for name in set(SAME) - matrices} == {0}


def test_coupled_decay_is_not_mups():
    groups = mup_groups(theirs(64), mup.MuAdamW, weight_decay=0.1)
    row = ours(64, weight_decay=0.1, decay="coupled")["w_query"]
    assert groups["w_query"]["lr"] * groups["w_query"]["weight_decay"] == pytest.approx(4 * row.decay_per_step)


@WIDTHS
def test_readout_divides_by_our_forward_multiplier(d_model):
    readout, x = theirs(d_model).unembedding.double(), torch.ones(d_model, dtype=torch.float64)
    product = readout.weight @ x
    ratio = (readout(x) - readout.bias) / product
    assert torch.allclose(ratio, torch.full_like(ratio, ours(d_model)["unembedding"].forward_multiplier), rtol=1e-12)


@WIDTHS
def test_initial_standard_deviations_scale_as_mups_normal(d_model, monkeypatch):
    """mup's own draw, with the numbers it hands to torch read off instead of estimated."""
    model, drawn = theirs(d_model), {}

    def record(tensor, mean, std, **_):
        drawn[id(tensor)] = (mean, std)

    monkeypatch.setattr("mup.init._no_grad_normal_", record)
    base, rows = ours(D_BASE), ours(d_model)
    matrices = [name for name in SAME if rows[name].init_std > 0]
    assert len(matrices) == 8
    for name in matrices:
        tensor = model.get_parameter(SAME[name])
        mup.normal_(tensor, std=base[name].init_std)
        assert drawn[id(tensor)] == (0, pytest.approx(rows[name].init_std, rel=1e-12)), name


@pytest.mark.parametrize("make_model, seen", [(theirs, True), (Shapes, False)])
def test_torchs_default_initialization_has_our_scale_after_set_base_shapes(make_model, seen):
    """`set_base_shapes` makes torch's 1/sqrt(fan-in) of the readout constant over width, as form B is."""

    def std(d_model):
        torch.manual_seed(0)
        return make_model(d_model).unembedding.weight.std().item()

    ours_ratio = ours(64)["unembedding"].init_std / ours(16)["unembedding"].init_std
    # the std of 272 uniform values has a relative error of sqrt(0.2 / 272), 2.7 percent; without it the ratio is 1/2
    assert math.isclose(std(64) / std(16), ours_ratio, rel_tol=0.15) is seen
