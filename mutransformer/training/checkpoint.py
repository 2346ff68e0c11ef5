"""Checkpoints: written whole or not at all, so that kill -9 or a full disk leaves the last one readable.

A run on one device writes a file; on XLA, where each host has its own part of every tensor, a folder
(`mutransformer/xla/shards.py`). Any engine reads both.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.distributed.checkpoint.api import CheckpointException

from mutransformer.errors import ConfigError, SaveError
from mutransformer.xla import shards


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary name in the same folder, flushes to the disk, then renames; remote paths as Lightning.

    Tensors in parts go to a folder of shards.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Replaces `path` by the checkpoint, or leaves it as it was.

        Raises:
            SaveError: it could not be written whole.
        """
        if shards.holds_shards(checkpoint):
            _save_shards(checkpoint, path)
            return
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException as error:
            if temporary.is_file():
                temporary.unlink()
            if isinstance(error, (OSError, RuntimeError)):  # torch.save turns a full disk into a RuntimeError
                reason = error.__context__ if isinstance(error.__context__, OSError) else error
                message = f"checkpoint {path} could not be written ({reason}); what was there is intact"
                raise SaveError(message) from error
            raise

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A file, or a folder of shards with its tensors whole, on the CPU."""
        return shards.load(path) if shards.is_sharded(path) else super().load_checkpoint(path, *args, **kwargs)


def _save_shards(checkpoint: dict[str, Any], path: Any) -> None:
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    try:
        shards.save(checkpoint, path, f"step-{checkpoint['global_step']}", group)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise SaveError(f"checkpoint {path} could not be written ({error}); what was there is intact") from error


def load_plain(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A checkpoint as plain types and tensors on the CPU (`weights_only=True`).

    Raises:
        ConfigError: there is no such file, or it is not one of this package's checkpoints.
    """
    remedy = "give the path of a .ckpt file that `mutransformer fit` wrote"
    is_sharded = shards.is_sharded(path)
    if not is_sharded and not Path(path).is_file():
        raise ConfigError("ckpt_path", str(path), "there is no such file", remedy)
    try:
        if is_sharded:
            checkpoint = shards.load(path)
        else:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (Exception, CheckpointException) as error:
        raise ConfigError("ckpt_path", str(path), f"is not readable ({type(error).__name__})", remedy) from error
    origin = checkpoint.get("mutransformer") if isinstance(checkpoint, dict) else None
    if not (isinstance(origin, dict) and {"config", "module", "versions"} <= origin.keys()):
        raise ConfigError("ckpt_path", str(path), "was not written by this package", remedy)
    return checkpoint
