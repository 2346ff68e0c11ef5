"""The feed-forward half of a block: two projections around a nonlinearity, or three with a gate (swiglu)."""

from __future__ import annotations

import torch

from mutransformer.model.activations import ACTIVATIONS, swiglu
from mutransformer.model.config import DecoderConfig
from mutransformer.model.layers import Layer
from mutransformer.model.linear import linear
from mutransformer.model.tap import tap


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
        active_BLF = swiglu(gate_BLF, hidden_BLF)
    else:
        active_BLF = ACTIVATIONS[config.activation](hidden_BLF)
    active_BLF = tap("feedforward_activation", active_BLF)
    return tap("feedforward_output", linear(active_BLF, layer["w_ff_out"], layer.get("b_ff_out")))
