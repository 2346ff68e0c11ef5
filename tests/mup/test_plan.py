from __future__ import annotations

import math
import subprocess
import sys
import textwrap

import pytest
import torch
from helpers import make_decoder, mup, plan_of, rows_of, small
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mutransformer.model.decoder import Decoder
from mutransformer.mup.config import OptimizerConfig
from mutransformer.mup.init import initialize
from mutransformer.mup.roles import UnclaimedParameterError
from mutransformer.training.optimizer import build_optimizer

SHAPES = [
    {},
    {"d_model": 24, "n_kv_head": 1, "ff_multiple": 2.7},
    {"d_model": 32, "n_kv_head": 2, "activation": "swiglu", "tie_embeddings": True},
    {"projection_biases": True, "norm_gains": "vector", "qk_norm": True, "embedding_norm": True},
    {"projection_biases": True, "norm_gains": "scalar", "qk_norm": True, "activation": "swiglu"},
]


def test_shapes_axes_and_count_of_a_decoder_worked_out_by_hand():
    decoder = small(d_model=24, n_layer=3, d_head=8, n_kv_head=1, ff_multiple=2.0, activation="swiglu", vocab_size=5)
    rows = rows_of(decoder)
    assert {name: row.shape for name, row in rows.items()} == {
        "embedding": (5, 24),
        "w_query": (3, 3, 8, 24),
        "w_key": (3, 1, 8, 24),
        "w_value": (3, 1, 8, 24),
        "w_attention_out": (3, 24, 3, 8),
        "w_ff_in": (3, 48, 24),
        "w_ff_gate": (3, 48, 24),
        "w_ff_out": (3, 24, 48),
        "unembedding": (5, 24),
    }
    assert decoder.plan(mup(), OptimizerConfig()).count == 2 * 5 * 24 + 3 * (24 * 24 * 2 + 24 * 8 * 2 + 24 * 48 * 3)
    assert (rows["w_ff_out"].fan_in, rows["w_ff_out"].fan_out) == (48, 24)
    assert (rows["w_key"].fan_in, rows["w_key"].fan_out) == (24, 8)


@pytest.mark.parametrize("shape", SHAPES)
def test_plan_describes_the_decoder_it_was_made_for(shape):
    config = small(**shape)
    plan, sizes = plan_of(config), config.axis_sizes()
    with torch.device("meta"):
        parameters = dict(Decoder(config, plan).named_parameters())
    assert {row.name: row.shape for row in plan.rows} == {n: tuple(p.shape) for n, p in parameters.items()}
    assert plan.count == sum(p.numel() for p in parameters.values())
    for row in plan.rows:
        assert row.shape == tuple(sizes[axis] for axis in row.axes)
        assert row.count == math.prod(row.shape)


@given(
    n_head=st.integers(1, 8),
    n_layer=st.integers(1, 5),
    ff_multiple=st.floats(0.5, 6),
    is_gated=st.booleans(),
    is_tied=st.booleans(),
)
def test_count_is_the_formula_of_the_architecture(n_head, n_layer, ff_multiple, is_gated, is_tied):
    config = small(
        d_model=8 * n_head,
        n_layer=n_layer,
        ff_multiple=ff_multiple,
        activation="swiglu" if is_gated else "relu",
        tie_embeddings=is_tied,
    )
    d_model, d_ff, vocab_size = config.d_model, config.d_ff, config.vocab_size
    in_layer = 4 * d_model**2 + (3 if is_gated else 2) * d_model * d_ff
    assert plan_of(config).count == n_layer * in_layer + (1 if is_tied else 2) * vocab_size * d_model


# A parameter without a role, and a role without a parameter


class WithExtra(nn.Module):
    """A decoder somebody added a parameter to."""

    def __init__(self):
        super().__init__()
        decoder = make_decoder(small())
        for name, parameter in decoder.named_parameters():
            self.register_parameter(name, parameter)
        self.w_adapter = nn.Parameter(torch.zeros(2))


def use_in_optimizer(parameters):
    build_optimizer(parameters.items(), plan_of(small()), OptimizerConfig())


def use_in_initialization(parameters):
    initialize(parameters, plan_of(small()), seed=0)


USES = pytest.mark.parametrize("use", [use_in_optimizer, use_in_initialization])


@USES
def test_a_parameter_that_no_role_claims_is_an_error_that_names_it(use):
    with pytest.raises(UnclaimedParameterError, match="'w_adapter' has no role"):
        use(dict(WithExtra().named_parameters()))


@USES
def test_a_planned_parameter_that_is_missing_is_an_error_that_names_it(use):
    parameters = dict(make_decoder(small()).named_parameters())
    use(parameters)
    del parameters["w_ff_in"]
    with pytest.raises(UnclaimedParameterError, match="the plan has parameter 'w_ff_in', the model does not"):
        use(parameters)


# Cost


def test_a_plan_of_a_hundred_billion_weights_needs_no_torch_no_memory_and_no_time():
    script = """
        import sys, time, tracemalloc
        tracemalloc.start()
        started = time.perf_counter()
        from mutransformer.model.config import DecoderConfig
        from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig
        shape = DecoderConfig(d_model=12288, d_head=128, n_layer=56, vocab_size=32000)
        plan = shape.plan(ParametrizationConfig(), OptimizerConfig())
        took_s = time.perf_counter() - started
        _, peak = tracemalloc.get_traced_memory()  # the process's own peak may be the one of its parent, on Linux
        print(plan.count, took_s, peak, "torch" in sys.modules, "numpy" in sys.modules)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    count, took_s, peak_bytes, has_torch, has_numpy = run.stdout.split()
    assert int(count) > 100e9
    assert float(took_s) < 1
    assert int(peak_bytes) < 100 * 2**20
    assert (has_torch, has_numpy) == ("False", "False")


# What is known not to transfer, or is not read


@pytest.mark.parametrize(
    "decoder, parametrization, optimizer, start",
    [
        ({}, {"rules": "sp"}, {}, "rules sp"),
        ({"norm_gains": "scalar"}, {}, {}, "norm_gains"),
        ({}, {}, {"algorithm": "lion"}, "algorithm lion"),
        ({}, {}, {"decay": "coupled", "weight_decay": 0.1}, "decay coupled"),
        ({}, {"n_base_layer": 4}, {}, "n_layer differs"),
        ({"tie_embeddings": True}, {}, {}, "tie_embeddings"),
        ({"norm_gains": "vector"}, {"rules": "sp"}, {"algorithm": "lion"}, "rules sp"),
        ({}, {}, {"weight_decay": 0.1}, "weight_decay"),
        ({}, {"embedding_lr_rule": "sqrt", "rules": "mup_absolute"}, {}, "embedding_lr_rule sqrt"),
        ({}, {"embedding_lr_rule": "sqrt"}, {"algorithm": "sgd"}, "embedding_lr_rule sqrt"),
        ({}, {"depth_alpha": 0.5}, {}, "depth_alpha"),
        ({}, {}, {"momentum": 0.9}, "momentum"),
    ],
)
def test_settings_that_need_not_transfer_or_are_not_read_are_warned_about(decoder, parametrization, optimizer, start):
    plan = small(**decoder).plan(mup(**parametrization), OptimizerConfig(**optimizer))
    assert [warning[: len(start)] for warning in plan.warnings] == [start]


@pytest.mark.parametrize(
    "decoder, parametrization, optimizer",
    [
        ({}, {}, {}),
        ({"d_model": 64}, {}, {"weight_decay": 1e-4}),
        ({}, {}, {"decay": "coupled"}),
        ({}, {"embedding_lr_rule": "sqrt"}, {}),
        ({}, {}, {"momentum": 0.9, "algorithm": "sgd"}),
        ({}, {"n_base_layer": 4, "depth_rule": "completep"}, {}),
        ({"tie_embeddings": True}, {"output_multiplier": 1 / 16}, {}),
    ],
)
def test_settings_that_transfer_are_not_warned_about(decoder, parametrization, optimizer):
    assert small(**decoder).plan(mup(**parametrization), OptimizerConfig(**optimizer)).warnings == ()
