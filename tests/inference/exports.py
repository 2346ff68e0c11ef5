"""Decoders whose every tensor and multiplier does something, for the tests of what is written of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers import make_module, mup, normal, small, write_checkpoint

from mutransformer.data.tokenizer import ByteTokenizer
from mutransformer.inference.export import Exported, export
from mutransformer.inference.weights import load_module
from mutransformer.training.module import DecoderModule

VOCAB = 384
FACTORS = {"output_multiplier": 3.0, "input_multiplier": 0.7, "residual_multiplier": 0.5, "qk_scale": 0.3}


def module_of(decoder: dict[str, Any], **parametrization: Any) -> DecoderModule:
    """A module of width 32 with weights; multipliers are FACTORS unless told otherwise."""
    shape = small(**{"d_model": 32, "vocab_size": VOCAB, "sequence_len": 16, **decoder})
    module = make_module(shape, mup(**{**FACTORS, **parametrization}))
    module.configure_model()
    with torch.no_grad():
        for i, (name, parameter) in enumerate(module.decoder.named_parameters()):
            if name.startswith(("b_", "gain_")):
                parameter.add_(0.3 * normal(*parameter.shape, seed=i).float())
    return module.requires_grad_(False)


def export_of(module: DecoderModule, folder: Path, **options: Any) -> Exported:
    """Writes the module's checkpoint beside `folder` and exports that."""
    checkpoint = write_checkpoint(module, folder.with_suffix(".ckpt"))
    options = {"format": "hf", "tokenizer": ByteTokenizer(), "separator": 1, **options}
    return export(load_module(checkpoint), str(folder), **options)
