"""`tap(name, tensor)`: the named points of the forward pass, where a check looks and an engine shards.

A recorder gets a detached tensor, so a recorded step computes the same bits as one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from mutransformer.model.axes import ACTIVATIONS, mark

Recorder = Callable[[str, torch.Tensor], None]

_recorder: Recorder | None = None


def tap(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, marked with its logical axes; also handed to the recorder if there is one.

    Args:
        name: a key of `axes.ACTIVATIONS`; once a layer in order of depth for tensors inside a block.
        tensor: the activation.
    Returns:
        The tensor to go on with.
    """
    if _recorder is not None:
        _recorder(name, tensor.detach())
    for axes in ACTIVATIONS[name]:
        tensor = mark(tensor, axes)
    return tensor


def is_recording() -> bool:
    """Whether anybody listens: for what is computed for the recorder alone."""
    return _recorder is not None


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Calls `recorder(name, tensor)` for every tap in the block."""
    global _recorder
    previous, _recorder = _recorder, recorder
    try:
        yield
    finally:
        _recorder = previous
