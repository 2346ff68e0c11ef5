"""The feed-forward half of a block: two projections around a nonlinearity, or three with a gate (swiglu)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from mutransformer.model.config import DecoderConfig
from mutransformer.model.layers import Layer
from mutransformer.model.linear import linear
from mutransformer.model.tap import tap

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sqrelu": lambda h: F.relu(h).square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "elu": F.elu,
    "selu": F.selu,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "relu6": F.relu6,
    "celu": F.celu,
    "mish": F.mish,
    "hard_tanh": F.hardtanh,
    "hard_sigmoid": F.hardsigmoid,
    "hard_silu": F.hardswish,
    "log_sigmoid": F.logsigmoid,
    "soft_sign": F.softsign,
    "squareplus": lambda h: (h + (h.square() + 4).sqrt()) / 2,
}


def feedforward(x_BLD: torch.Tensor, layer: Layer, config: DecoderConfig) -> torch.Tensor:
    """Feed-forward of one block, from normalized input to what is added to the residual stream.

    Args:
        x_BLD: normalized block input.
        layer: this layer's tensors by name, without the layer dimension, in x's dtype.
        config: shape.
    Returns:
        out_BLD, same dtype.
    """
    x_BLD = tap("feedforward_input", x_BLD)
    hidden_BLF = tap("feedforward_hidden", linear(x_BLD, layer["w_ff_in"], layer.get("b_ff_in")))
    if config.activation == "swiglu":
        gate_BLF = tap("feedforward_gate", linear(x_BLD, layer["w_ff_gate"], layer.get("b_ff_gate")))
        active_BLF = F.silu(gate_BLF) * hidden_BLF
    else:
        active_BLF = ACTIVATIONS[config.activation](hidden_BLF)
    active_BLF = tap("feedforward_activation", active_BLF)
    return tap("feedforward_output", linear(active_BLF, layer["w_ff_out"], layer.get("b_ff_out")))
