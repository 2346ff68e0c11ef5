"""Logical axes of the tensors in a forward pass, and `mark`, through which an engine shards them.

The model says what each dimension means; which axis of a device mesh that goes to is the engine's business, in one
table (`mutransformer/xla/sharding.py`). Without such an engine `mark` returns its argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

Axes = tuple[str, ...]
Marker = Callable[[torch.Tensor, Axes], torch.Tensor]

_RESIDUAL: Axes = ("batch", "length", "embed")
_SUM: Axes = ("batch", "length", "gathered")  # of the parts that devices make of an output of a block
_QUERY: Axes = ("batch", "heads", "length", "head_dim")
_KEY: Axes = ("batch", "kv_heads", "length", "head_dim")
_SCORES: Axes = ("batch", "heads", "length", "keys")
_HIDDEN: Axes = ("batch", "length", "mlp")

# name of a tap -> axis of each dimension; where there are two, marks one after the other: the sum of parts is made, and
# its gradient gathered, in one place
ACTIVATIONS: Mapping[str, tuple[Axes, ...]] = {
    "embedding": (_RESIDUAL,),
    "residual": (_RESIDUAL,),
    "attention_input": (_RESIDUAL,),
    "query": (_QUERY,),
    "key": (_KEY,),
    "value": (_KEY,),
    "query_rotated": (_QUERY,),
    "key_rotated": (_KEY,),
    "scores": (_SCORES,),
    "weights": (_SCORES,),
    "attention_mixed": (_QUERY,),
    "attention_output": (_SUM, _RESIDUAL),
    "feedforward_input": (_RESIDUAL,),
    "feedforward_hidden": (_HIDDEN,),
    "feedforward_gate": (_HIDDEN,),
    "feedforward_activation": (_HIDDEN,),
    "feedforward_output": (_SUM, _RESIDUAL),
    "logits": (("batch", "length", "vocab"),),
}

# a weight's axis -> the axis that is whole where the weight is used, if the weight has both
_WHOLE_AT_USE: Mapping[str, str] = {"heads": "embed", "kv_heads": "embed", "mlp": "embed", "vocab": "vocab"}

_marker: Marker | None = None


def mark(tensor: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The tensor, sharded by the engine if it shards.

    Args:
        tensor: any; one dimension an axis.
        axes: the logical axis of each dimension.
    """
    return tensor if _marker is None else _marker(tensor, axes)


def used(weight: torch.Tensor, axes: Axes) -> torch.Tensor:
    """A weight as it is multiplied with: whole along the dimension that is cut only to store it.

    Both states are marked, so that an engine gathers the weight here and nowhere else, and scatters its gradient back,
    whatever would look cheaper to it.

    Args:
        weight: a parameter, or a layer's slice of one.
        axes: its logical axes, `layers` left out.
    """
    whole = {_WHOLE_AT_USE[axis] for axis in axes if axis in _WHOLE_AT_USE}
    at_use = tuple("gathered" if axis in whole else axis for axis in axes)
    weight = mark(weight, axes)
    return weight if at_use == axes else mark(weight, at_use)


@contextmanager
def marking(marker: Marker) -> Iterator[None]:
    """Sends every `mark` in the block to `marker`, which returns the tensor to go on with."""
    global _marker
    previous, _marker = _marker, marker
    try:
        yield
    finally:
        _marker = previous
