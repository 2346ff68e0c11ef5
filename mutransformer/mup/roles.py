"""What every parameter of the decoder is: its name, its role and its logical axes, in one table.

Read by `plan.py` (rules), `model/` (shapes) and the sharding tables. Roles are keyed by parameter *name*, never by an
attribute of a tensor: moving a module to an XLA device makes new Parameters and loses attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """How a tensor's dimensions grow with width (Tensor Programs V, arXiv 2203.03466, Table 3)."""

    INPUT = "input"  # fan-out grows alone
    HIDDEN = "hidden"  # fan-in and fan-out grow
    OUTPUT = "output"  # fan-in grows alone
    VECTOR = "vector"  # biases and gains: a width-like dimension and no fan-in


class Role(str, Enum):
    """The closed set of roles; rules and per-role multipliers are keyed by it."""

    EMBEDDING = "embedding"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    ATTENTION_OUTPUT = "attention_output"
    FEEDFORWARD_IN = "feedforward_in"
    FEEDFORWARD_GATE = "feedforward_gate"
    FEEDFORWARD_OUT = "feedforward_out"
    UNEMBEDDING = "unembedding"
    BIAS = "bias"
    GAIN = "gain"


# role -> (kind, the axes that are summed over)
ROLE_KIND: Mapping[Role, tuple[Kind, tuple[str, ...]]] = {
    Role.EMBEDDING: (Kind.INPUT, ("vocab",)),
    Role.QUERY: (Kind.HIDDEN, ("embed",)),
    Role.KEY: (Kind.HIDDEN, ("embed",)),
    Role.VALUE: (Kind.HIDDEN, ("embed",)),
    Role.ATTENTION_OUTPUT: (Kind.HIDDEN, ("heads", "head_dim")),
    Role.FEEDFORWARD_IN: (Kind.HIDDEN, ("embed",)),
    Role.FEEDFORWARD_GATE: (Kind.HIDDEN, ("embed",)),
    Role.FEEDFORWARD_OUT: (Kind.HIDDEN, ("mlp",)),
    Role.UNEMBEDDING: (Kind.OUTPUT, ("embed",)),
    Role.BIAS: (Kind.VECTOR, ()),
    Role.GAIN: (Kind.VECTOR, ()),
}


@dataclass(frozen=True)
class TensorSpec:
    """One parameter: name, role, and the logical axis of each dimension, `layers` first where there is one a layer."""

    name: str
    role: Role
    axes: tuple[str, ...]

    @property
    def kind(self) -> Kind:
        return ROLE_KIND[self.role][0]

    @property
    def fan_in_axes(self) -> tuple[str, ...]:
        return ROLE_KIND[self.role][1]

    @property
    def fan_out_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.axes if axis != "layers" and axis not in self.fan_in_axes)

    @property
    def is_in_block(self) -> bool:
        """Whether the tensor sits in a residual block, one slice a layer."""
        return "layers" in self.axes


TENSORS: Mapping[str, TensorSpec] = {
    spec.name: spec
    for spec in (
        TensorSpec("embedding", Role.EMBEDDING, ("vocab", "embed")),
        TensorSpec("gain_embedding", Role.GAIN, ("embed",)),
        TensorSpec("gain_attention", Role.GAIN, ("layers", "embed")),
        TensorSpec("w_query", Role.QUERY, ("layers", "heads", "head_dim", "embed")),
        TensorSpec("w_key", Role.KEY, ("layers", "kv_heads", "head_dim", "embed")),
        TensorSpec("w_value", Role.VALUE, ("layers", "kv_heads", "head_dim", "embed")),
        TensorSpec("b_query", Role.BIAS, ("layers", "heads", "head_dim")),
        TensorSpec("b_key", Role.BIAS, ("layers", "kv_heads", "head_dim")),
        TensorSpec("b_value", Role.BIAS, ("layers", "kv_heads", "head_dim")),
        TensorSpec("gain_query", Role.GAIN, ("layers", "head_dim")),
        TensorSpec("gain_key", Role.GAIN, ("layers", "head_dim")),
        TensorSpec("w_attention_out", Role.ATTENTION_OUTPUT, ("layers", "embed", "heads", "head_dim")),
        TensorSpec("b_attention_out", Role.BIAS, ("layers", "embed")),
        TensorSpec("gain_feedforward", Role.GAIN, ("layers", "embed")),
        TensorSpec("w_ff_in", Role.FEEDFORWARD_IN, ("layers", "mlp", "embed")),
        TensorSpec("w_ff_gate", Role.FEEDFORWARD_GATE, ("layers", "mlp", "embed")),
        TensorSpec("b_ff_in", Role.BIAS, ("layers", "mlp")),
        TensorSpec("b_ff_gate", Role.BIAS, ("layers", "mlp")),
        TensorSpec("w_ff_out", Role.FEEDFORWARD_OUT, ("layers", "embed", "mlp")),
        TensorSpec("b_ff_out", Role.BIAS, ("layers", "embed")),
        TensorSpec("gain_final", Role.GAIN, ("embed",)),
        TensorSpec("unembedding", Role.UNEMBEDDING, ("vocab", "embed")),
        TensorSpec("b_unembedding", Role.BIAS, ("vocab",)),
    )
}


class UnclaimedParameterError(LookupError):
    """A parameter of the model that no role claims, or a planned one that the model lacks; the message names it."""
