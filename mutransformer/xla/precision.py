"""Precision on XLA: the model casts at use, so nothing is left for Lightning to do but to know the name."""

from __future__ import annotations

from lightning.pytorch.plugins.precision import Precision


class CastAtUse(Precision):
    """Keeps masters, gradients and optimizer state as they are; the decoder casts to its compute dtype.

    Lightning's own plugins set environment variables that torch_xla no longer reads, turn the masters themselves to
    bfloat16, or open an autocast for CUDA.

    Args:
        precision: what `trainer.precision` says, e.g. `bf16-mixed`.
    """

    def __init__(self, precision: str) -> None:
        self.precision = precision  # type: ignore[assignment]
