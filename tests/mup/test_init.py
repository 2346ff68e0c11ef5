from __future__ import annotations

import pytest
import torch
from helpers import make_decoder, mup, plan_of, rows_of, small

from mutransformer.model.decoder import Decoder
from mutransformer.mup.init import initialize

WIDE = small(d_model=128, ff_multiple=3.0, vocab_size=200, activation="swiglu")


def weights(config, **arguments):
    return make_decoder(config, dtype=torch.float32, **arguments).state_dict()


def test_same_seed_same_bits_another_seed_others():
    first, again, other = weights(small()), weights(small()), weights(small(), seed=1)
    for name in first:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


def test_no_two_tensors_share_their_draws():
    drawn = weights(small())
    firsts = {round(float(tensor.flatten()[0]) / rows_of(small())[name].init_std, 4) for name, tensor in drawn.items()}
    assert len(firsts) == len(drawn)


def test_a_tensor_does_not_depend_on_which_others_there_are():
    plain = weights(small())
    fuller = weights(small(projection_biases=True, norm_gains="vector", qk_norm=True, activation="swiglu"))
    assert set(fuller) > set(plain)
    for name in plain:
        assert torch.equal(plain[name], fuller[name])


def test_global_random_state_is_neither_read_nor_moved():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = weights(small())["w_query"]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(weights(small())["w_query"], first)


@pytest.mark.parametrize("settings", [{}, {"rules": "sp"}, {"unembedding_form": "B"}, {"embedding_init_std": 0.02}])
def test_standard_deviations_are_the_plans(settings):
    rows = rows_of(WIDE, mup(**settings))
    for name, tensor in weights(WIDE, **settings).items():
        # the sample's std has a relative error of 1 / sqrt(2 n); the mean's is std / sqrt(n). 5 sigma over 9 tensors
        n, std = tensor.numel(), rows[name].init_std
        assert abs(tensor.std().item() / std - 1) < 5 * (2 * n) ** -0.5, name
        assert abs(tensor.mean().item()) < 5 * std * n**-0.5, name


def test_draws_are_gaussian():
    tensor = weights(WIDE)["w_ff_in"].double()
    standard = tensor / rows_of(WIDE)["w_ff_in"].init_std
    # the fourth moment of n standard normals: 3, with a standard deviation of sqrt(96 / n); a uniform has 1.8
    assert abs(standard.pow(4).mean().item() - 3) < 5 * (96 / standard.numel()) ** 0.5


def test_layers_differ():
    first, second = weights(small())["w_query"]
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    "settings, zeros",
    [
        ({}, set()),
        ({"query_init": "zero"}, {"w_query"}),
        ({"residual_init": "zero"}, {"w_attention_out", "w_ff_out"}),
        ({"unembedding_init": "zero"}, {"unembedding"}),
    ],
)
def test_zero_initialization(settings, zeros):
    assert {name for name, tensor in weights(small(), **settings).items() if not tensor.any()} == zeros


def test_biases_start_at_zero_and_gains_at_one():
    config = small(projection_biases=True, norm_gains="vector", qk_norm=True, embedding_norm=True)
    drawn = weights(config)
    biases = [tensor for name, tensor in drawn.items() if name.startswith("b_")]
    gains = [tensor for name, tensor in drawn.items() if name.startswith("gain_")]
    assert (len(biases), len(gains)) == (7, 6)
    assert not any(tensor.any() for tensor in biases)
    assert all((tensor == 1).all() for tensor in gains)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_dtype_gets_the_same_float32_draws(dtype):
    plan = plan_of(small())
    decoder = Decoder(small(), plan).to(dtype)
    initialize(dict(decoder.named_parameters()), plan, seed=0)
    for name, tensor in weights(small()).items():
        assert torch.equal(getattr(decoder, name), tensor.to(dtype))
