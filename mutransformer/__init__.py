"""muP pre-training of transformer decoders with PyTorch Lightning. Names load on first use; importing costs nothing."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_LAZY = {
    "DecoderModule": "mutransformer.training.module",
    "TextDataModule": "mutransformer.data.datamodule",
    "DecoderConfig": "mutransformer.model.config",
    "Decoder": "mutransformer.model.decoder",
    "ParametrizationConfig": "mutransformer.mup.config",
    "OptimizerConfig": "mutransformer.mup.config",
    "ScheduleConfig": "mutransformer.training.schedule",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
