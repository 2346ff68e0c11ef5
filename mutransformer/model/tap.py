"""`tap(name, tensor)`: lets a check or a profile see a tensor inside the forward pass; does nothing unless asked.

The recorder gets a detached tensor, so a recorded step computes the same bits as one that is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Recorder = Callable[[str, torch.Tensor], None]

_recorder: Recorder | None = None


def tap(name: str, tensor: torch.Tensor) -> None:
    """Hands `tensor` to the recorder, once a layer in order of depth for tensors inside a block."""
    if _recorder is not None:
        _recorder(name, tensor.detach())


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
