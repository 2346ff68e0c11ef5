"""muP pre-training of transformer decoders with PyTorch Lightning. Names load on first use; importing costs nothing."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mutransformer.data.datamodule import TextDataModule
    from mutransformer.model.config import DecoderConfig
    from mutransformer.model.decoder import Decoder
    from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig
    from mutransformer.training.module import DecoderModule
    from mutransformer.training.schedule import ScheduleConfig
    from mutransformer.verify.coordcheck import coordcheck

# before anything imports gcsfs, which looks for a newer kind of bucket first, for minutes on a network without one
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

__version__ = "0.1.0"

__all__ = [
    "Decoder",
    "DecoderConfig",
    "DecoderModule",
    "OptimizerConfig",
    "ParametrizationConfig",
    "ScheduleConfig",
    "TextDataModule",
    "__version__",
    "coordcheck",
]

_LAZY = {
    "DecoderModule": "mutransformer.training.module",
    "TextDataModule": "mutransformer.data.datamodule",
    "DecoderConfig": "mutransformer.model.config",
    "Decoder": "mutransformer.model.decoder",
    "ParametrizationConfig": "mutransformer.mup.config",
    "OptimizerConfig": "mutransformer.mup.config",
    "ScheduleConfig": "mutransformer.training.schedule",
    "coordcheck": "mutransformer.verify.coordcheck",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
