"""Checkpoints: written whole or not at all, beside the training, and read back as plain values.

A run on one device writes a file; on XLA, where each host has its own part of every tensor, a folder
(`mutransformer/xla/shards.py`). Any engine reads both.

Which checkpoints there are and which are kept is `run_checkpoint.py`'s business; here a checkpoint is written, removed,
found and read.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
import zipfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import fsspec
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch.distributed.checkpoint.api import CheckpointException

from mutransformer.errors import ConfigError, DataError, SaveError
from mutransformer.xla import shards

_NAME = re.compile(r"step_(\d+)\.ckpt")


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint at a count of optimizer steps."""
    return f"step_{step:08d}.ckpt"


def checkpoints_in(folder: str) -> dict[int, str]:
    """Step -> path of the checkpoints in a folder, local or of a URL that fsspec can open, in order of steps."""
    fs, root = fsspec.core.url_to_fs(folder)
    with suppress(FileNotFoundError, NotADirectoryError):
        names = {path.rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False, refresh=True)}
        steps = sorted((int(match[1]), name) for name in names if (match := _NAME.fullmatch(name)))
        return {step: f"{folder.rstrip('/')}/{name}" for step, name in steps}
    return {}


def newest_readable(folder: str) -> tuple[str | None, list[ConfigError]]:
    """The checkpoint of the highest step in a folder that can be read, and why those of higher steps cannot."""
    errors = []
    for path in reversed(checkpoints_in(folder).values()):
        try:
            load_plain(path, tensors=False)
        except ConfigError as error:
            errors.append(error)
        else:
            return path, errors
    return None, errors


def remove_unfinished(folder: str) -> None:
    """Removes what writers that were killed left behind in a folder; nobody else may be writing there."""
    for path in checkpoints_in(folder).values():
        if shards.is_unfinished(path):
            file_system, root = fsspec.core.url_to_fs(path)
            file_system.rm(root, recursive=True)
    if "://" in folder:
        return
    for aside in Path(folder).glob(".step_*.old"):
        path = aside.with_name(aside.name.removeprefix(".").removesuffix(".old"))
        if not path.exists():
            aside.rename(path)
    for leftover in [*Path(folder).glob(".step_*.tmp"), *Path(folder).glob(".step_*.old")]:
        _remove(leftover)


def require_writable(field: str, folder: str) -> None:
    """Makes a folder, local or of a store, and for a moment a file in it; not to learn after hours that it cannot be.

    Args:
        field: the setting that names the folder.
        folder: its path or URL.
    Raises:
        ConfigError: it cannot be written to.
    """
    file_system, root = fsspec.core.url_to_fs(folder)
    probe = f"{root}/.{uuid.uuid4().hex}.tmp"
    try:
        if "://" not in folder:
            file_system.makedirs(root, exist_ok=True)
        file_system.pipe_file(probe, b"mutransformer")
        file_system.rm_file(probe)
    except Exception as error:  # whatever the store raises
        reason = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        remedy = "give a folder that you can write to"
        raise ConfigError(field, folder, f"cannot be written to ({reason})", remedy) from error


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary name in the same folder, flushes to the disk, renames; an object store puts at once.

    Tensors in parts go to a folder of shards.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Replaces `path` by the checkpoint, or leaves it as it was.

        Raises:
            SaveError: it could not be written whole.
        """
        try:
            if shards.holds_shards(checkpoint):
                _save_shards(checkpoint, path)
            elif "://" in str(path):
                super().save_checkpoint(checkpoint, path, storage_options)
                shards.invalidate(path)  # a folder of that name, of another engine
            else:
                _write_local(checkpoint, Path(path))
        # torch.save turns a full disk into a RuntimeError, a store has errors of its own
        except (Exception, CheckpointException) as error:
            reason = error.__context__ if isinstance(error.__context__, OSError) else error
            text = " ".join(f"{reason}".split()) or type(reason).__name__
            message = f"checkpoint {path} could not be written ({text}); what was there is intact"
            raise SaveError(message) from error

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A file, or a folder of shards with its tensors whole, on the CPU."""
        return shards.load(path) if shards.is_sharded(path) else super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        shards.invalidate(path)
        super().remove_checkpoint(path)


def _write_local(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        _put_in_place(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _save_shards(checkpoint: dict[str, Any], path: Any) -> None:
    """Writes a folder; a file of that name, of another engine, goes when the folder is whole."""
    name = f"step-{checkpoint['global_step']}"
    file_system, root = fsspec.core.url_to_fs(str(path))
    is_over_file = file_system.isfile(root)
    if not is_over_file or "://" in str(path):
        shards.save(checkpoint, path, name)
        if is_over_file:
            file_system.rm_file(root)
        return
    temporary = Path(path).with_name(f".{Path(path).name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shards.save(checkpoint, temporary, name)
    _put_in_place(temporary, Path(path))


def _put_in_place(new: Path, path: Path) -> None:
    """Renames; a folder over a file or a file over a folder has to step aside first, see `remove_unfinished`."""
    if path.exists() and path.is_dir() != new.is_dir() and not path.is_symlink():
        aside = path.with_name(f".{path.name}.old")
        path.rename(aside)
        new.rename(path)
        _remove(aside)
    else:
        new.replace(path)


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


class BackgroundCheckpointIO(CheckpointIO):
    """Hands checkpoints to another CheckpointIO in a thread: training waits for a copy in memory, not for the disk.

    One write at a time: the next waits for the one before. An error of a write is raised by the next call of `wait`,
    `save_checkpoint` or `load_checkpoint`. Lightning's AsyncCheckpointIO copies on the device and lets writes queue up.

    Args:
        checkpoint_io: writes, reads and removes.
    """

    def __init__(self, checkpoint_io: CheckpointIO) -> None:
        self.checkpoint_io = checkpoint_io
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._write: Future[None] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether the write that was begun last goes on."""
        return self._write is not None and not self._write.done()

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            SaveError: the last write failed; raised once.
        """
        write, self._write = self._write, None
        if write is not None:
            write.result()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Copies the checkpoint to the CPU's memory and begins to write it."""
        self.wait()
        copied = apply_to_collection(checkpoint, torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True))
        self._write = self._pool.submit(self.checkpoint_io.save_checkpoint, copied, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.wait()
        return self.checkpoint_io.load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.checkpoint_io.remove_checkpoint(path)

    def teardown(self) -> None:
        """Lets the last write end; its error has been raised by `wait`, or another error is on its way out."""
        if self._write is not None:
            self._write.exception()
        self.checkpoint_io.teardown()


def load_plain(path: str | os.PathLike[str], tensors: bool = True) -> dict[str, Any]:
    """A checkpoint as plain types and tensors on the CPU (`weights_only=True`); read whole where it is not local.

    Args:
        path: a file, or a folder of shards; local or of a URL that fsspec can open.
        tensors: with those of a folder of shards; a file's are there in any case, mapped and not read if it is local.
    Raises:
        ConfigError: there is no such file, or it is not one of this package's checkpoints.
    """
    remedy = "give the path of a .ckpt file that `mutransformer fit` wrote"
    try:
        checkpoint = _loader(os.fspath(path), tensors)()
    except FileNotFoundError as error:
        raise ConfigError("ckpt_path", str(path), "there is no such file", remedy) from error
    except DataError as error:
        raise ConfigError("ckpt_path", str(path), f"is damaged ({error})", "give another checkpoint") from error
    except Exception as error:
        raise ConfigError("ckpt_path", str(path), f"is not readable ({type(error).__name__})", remedy) from error
    if not _is_ours(checkpoint):
        raise ConfigError("ckpt_path", str(path), "was not written by this package", remedy)
    return checkpoint


def _is_ours(checkpoint: Any) -> bool:
    """Whether it has what commands read of a checkpoint."""
    if not (isinstance(checkpoint, dict) and {"state_dict", "global_step"} <= checkpoint.keys()):
        return False
    origin = checkpoint.get("mutransformer")
    if not (isinstance(origin, dict) and all(isinstance(origin.get(name), dict) for name in ("config", "module"))):
        return False
    return {"decoder", "parametrization"} <= origin["module"].keys()


def _loader(path: str, tensors: bool) -> Callable[[], Any]:
    if shards.is_sharded(path):
        return lambda: shards.load(path, into=None if tensors else {})
    if Path(path).is_dir():
        raise FileNotFoundError(path)
    if "://" not in path:
        return lambda: _load_local(path)

    def load() -> Any:
        with fsspec.open(path, "rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[arg-type]

    return load


def _load_local(path: str) -> Any:
    checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    status = os.stat(path)
    if name := _damaged_part(path, status.st_mtime_ns, status.st_size):
        raise DataError(f"{name} in it is not what was written")
    return checkpoint


@lru_cache
def _damaged_part(path: str, mtime_ns: int, n_bytes: int) -> str | None:
    """The first part of a file that its checksum does not fit, None where all do; torch writes these, and reads none.

    Args:
        path: file that torch.save wrote.
        mtime_ns: of the file; with `n_bytes`, so that a file is read for this once a process.
        n_bytes: of the file.
    """
    with zipfile.ZipFile(path) as archive:
        return archive.testzip()
