from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from helpers import normal, small
from torch import nn

from mutransformer.model.activations import ACTIVATIONS
from mutransformer.model.config import Activation
from mutransformer.model.feedforward import feedforward

TORCHS = {
    "relu": nn.ReLU(),
    "gelu": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "elu": nn.ELU(),
    "selu": nn.SELU(),
    "softplus": nn.Softplus(),
    "leaky_relu": nn.LeakyReLU(),
    "relu6": nn.ReLU6(),
    "celu": nn.CELU(),
    "mish": nn.Mish(),
    "hard_tanh": nn.Hardtanh(),
    "hard_sigmoid": nn.Hardsigmoid(),
    "hard_silu": nn.Hardswish(),
    "log_sigmoid": nn.LogSigmoid(),
    "soft_sign": nn.Softsign(),
    "squareplus": lambda x: (x + torch.sqrt(x**2 + 4)) / 2,
    "sqrelu": lambda x: torch.where(x > 0, x * x, 0.0),
}


def test_every_activation_of_the_config_is_known():
    assert {*ACTIVATIONS, "swiglu"} == set(get_args(Activation))
    assert set(TORCHS) == set(ACTIVATIONS)


@pytest.mark.parametrize("name", TORCHS)
def test_activation_equals_torchs(name):
    x = torch.linspace(-8, 8, 101, dtype=torch.float64)
    assert torch.allclose(ACTIVATIONS[name](x), TORCHS[name](x), rtol=1e-15, atol=0)


def test_gelu_is_the_tanh_form():
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)
    formula = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert torch.allclose(ACTIVATIONS["gelu"](x), formula, rtol=0, atol=1e-14)
    assert not torch.allclose(ACTIVATIONS["gelu"](x), nn.functional.gelu(x), rtol=0, atol=1e-6)


def layer_of(**biases):
    names = {"w_ff_in": (12, 16), "w_ff_gate": (12, 16), "w_ff_out": (16, 12), **biases}
    return {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(names.items())}


BIASES = {"b_ff_in": (12,), "b_ff_gate": (12,), "b_ff_out": (16,)}


@pytest.mark.parametrize("biases", [{}, BIASES])
def test_two_projections_around_an_activation(biases):
    layer, x = layer_of(**biases), normal(2, 3, 16, seed=9)
    b_in, b_out = layer.get("b_ff_in", 0.0), layer.get("b_ff_out", 0.0)
    expected = torch.tanh(x @ layer["w_ff_in"].T + b_in) @ layer["w_ff_out"].T + b_out
    # sums of 16 products of size 1, in another order
    assert torch.allclose(feedforward(x, layer, small(activation="tanh")), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("biases", [{}, BIASES])
def test_swiglu_is_silu_of_the_gate_times_the_input(biases):
    layer, x = layer_of(**biases), normal(2, 3, 16, seed=9)
    b_in, b_gate, b_out = (layer.get(name, 0.0) for name in BIASES)
    gate = x @ layer["w_ff_gate"].T + b_gate
    hidden = x @ layer["w_ff_in"].T + b_in
    expected = (gate / (1 + torch.exp(-gate)) * hidden) @ layer["w_ff_out"].T + b_out
    assert torch.allclose(feedforward(x, layer, small(activation="swiglu")), expected, rtol=0, atol=1e-12)
