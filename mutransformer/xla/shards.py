"""Checkpoints as folders of shards, through torch.distributed.checkpoint: written by XLA, read by any engine.

A folder `NAME.ckpt` holds one or, while a newer one is being written, two states:

    current          the name of the state that is whole; replaced last, in one operation
    step-200/        tensors as torch.distributed.checkpoint writes them: `.metadata` and `*.distcp`
    step-200/meta.pt everything else, plain values

so that a kill at any moment leaves a whole one, on disks and in object stores alike. Nothing here needs torch_xla.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import fsspec
import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

# the public pair warns each time where there is one process
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from mutransformer.errors import DataError

POINTER = "current"
META = "meta.pt"
Where = tuple[slice, ...]


class DamagedCheckpointError(DataError):
    """What a checkpoint's folder holds is not what was written; the message names the tensor or the file."""


class HostShards:
    """The parts of one tensor that this host holds, in its memory; each part once, whatever the replicas.

    Args:
        shape: of the whole tensor.
        dtype: of the tensor.
        parts: where a part begins in the whole -> its values.
    """

    # no dataclass: who walks through nested values takes one apart, and copies the tensors once more
    def __init__(self, shape: torch.Size, dtype: torch.dtype, parts: dict[tuple[int, ...], torch.Tensor]) -> None:
        self.shape = shape
        self.dtype = dtype
        self.parts = parts

    @classmethod
    def of(cls, tensor: torch.Tensor, shards: Sequence[tuple[torch.Tensor, Where]]) -> HostShards:
        """From shards with their places, replicas among them."""
        parts = {tuple(part.start or 0 for part in where): data for data, where in shards}
        return cls(tensor.shape, tensor.dtype, parts)

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(part).all()) for part in self.parts.values())

    def take_from(self, whole: torch.Tensor) -> None:
        """Copies the parts out of the whole tensor."""
        for at, part in self.parts.items():
            part.copy_(whole[tuple(slice(start, start + size) for start, size in zip(at, part.shape, strict=True))])

    def empty_like(self) -> HostShards:
        return HostShards(self.shape, self.dtype, {at: torch.empty_like(part) for at, part in self.parts.items()})

    # what torch.distributed.checkpoint asks of a tensor in parts

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), part.shape) for at, part in self.parts.items()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self._chunks()
        ]

    def part(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        return self.parts[tuple(index.offset)]


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].part(index)


class _LoadPlanner(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        # torch's own looks for tensors to allocate, and takes a dataclass for a tree of them
        self.original_state_dict = self.state_dict = state_dict
        self.metadata, self.is_coordinator, self.mappings = metadata, is_coordinator, {}

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn].part(index)


def is_sharded(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a folder of shards with a whole state in it."""
    file_system, root = fsspec.url_to_fs(str(path))
    return file_system.isfile(f"{root}/{POINTER}")


def is_unfinished(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a folder of shards whose write or removal was interrupted: states, and none that is whole."""
    file_system, root = fsspec.url_to_fs(str(path))
    if not file_system.isdir(root) or is_sharded(path):
        return False
    return any(os.path.basename(name.rstrip("/")).startswith("step-") for name in file_system.ls(root, detail=False))


def holds_shards(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a checkpoint has a tensor in parts."""
    return any(True for _ in _leaves(checkpoint, ()))


def invalidate(path: str | os.PathLike[str]) -> None:
    """Takes the pointer away, so that a folder whose removal is interrupted holds no state."""
    file_system, root = fsspec.url_to_fs(str(path))
    _remove(file_system, f"{root}/{POINTER}")


def save(checkpoint: Mapping[str, Any], path: str | os.PathLike[str], name: str) -> None:
    """Writes a state and makes it the folder's current one; all hosts call this together.

    Args:
        checkpoint: nested dicts and lists; tensors in parts are HostShards.
        path: the folder, local or remote (`gs://`).
        name: of the state; that of the present one gets a suffix.
    Raises:
        DamagedCheckpointError: what was written reads back otherwise.
    """
    file_system, root = fsspec.url_to_fs(str(path))
    group = torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
    is_coordinator = group is None or torch.distributed.get_rank(group) == 0
    names = [f"{name}-again" if is_coordinator and name == _current(file_system, root) else name]
    if group is not None:
        torch.distributed.broadcast_object_list(names, 0, group)
    state = f"{root}/{names[0]}"
    url = file_system.unstrip_protocol(state) if "://" in str(path) else state
    tensors = {key_of(keys): shards for keys, shards in _leaves(checkpoint, ())}

    def prepare() -> None:
        _remove(file_system, state)  # left by a run that was killed
        file_system.makedirs(state, exist_ok=True)

    def write() -> None:
        writer = FsspecWriter(url, overwrite=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch's own use of it
            _save_state_dict(cast(Any, tensors), writer, group, no_dist=group is None, planner=_SavePlanner())

    def finish() -> None:
        with file_system.open(f"{state}/{META}", "wb") as file:
            torch.save(_without_shards(checkpoint), file)
        if _is_local(file_system):
            with open(f"{state}/{META}", "rb") as file:
                os.fsync(file.fileno())
        _point_to(file_system, root, names[0])
        for old in file_system.ls(root, detail=False):
            if os.path.basename(old.rstrip("/")) not in (names[0], POINTER):
                _remove(file_system, old)

    _together(group, prepare if is_coordinator else None)
    write()
    _together(group, lambda: verify(url, tensors))
    _together(group, finish if is_coordinator else None)


def _together(group: Any, work: Callable[[], None] | None) -> None:
    """Does this host's work and waits for the others'; an error of one is raised on all, so that none waits on."""
    error: Exception | None = None
    try:
        if work is not None:
            work()
    except Exception as own:
        error = own
    if group is not None:
        errors: list[str | None] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(errors, None if error is None else str(error), group)
        if error is None and (others := [text for text in errors if text is not None]):
            raise OSError(f"another host: {others[0]}")
    if error is not None:
        raise error


def verify(url: str, tensors: Mapping[str, HostShards]) -> None:
    """Compares what was written with what is in memory: that parts make the whole, and every byte of this host's.

    torch_xla's planner for such checkpoints leaves out tensors that are replicated in part; nothing may be lost here.

    Raises:
        DamagedCheckpointError: names the tensor.
    """
    reader = FsspecReader(url)
    metadata = reader.read_metadata()
    for key, shards in tensors.items():
        entry = metadata.state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata) or entry.size != shards.shape:
            raise DamagedCheckpointError(f"{url}: {key} is missing or has another shape")
        covered = sum(chunk.sizes.numel() for chunk in entry.chunks)
        if covered != shards.shape.numel():
            raise DamagedCheckpointError(f"{url}: {key} has {covered} of {shards.shape.numel()} values")
        back = shards.empty_like()
        _load_state_dict(cast(Any, {key: back}), reader, no_dist=True, planner=_LoadPlanner())
        for at, part in shards.parts.items():
            if not torch.equal(_bits(part), _bits(back.parts[at])):
                raise DamagedCheckpointError(f"{url}: {key} reads back otherwise than it was written")


def load(path: str | os.PathLike[str], into: Mapping[str, HostShards] | None = None) -> dict[str, Any]:
    """The current state of a folder.

    Args:
        path: the folder.
        into: key -> parts to fill, of the tensors that are wanted in parts; None: all tensors whole, on the CPU.
    Returns:
        The checkpoint; where tensors were wanted in parts, they are left out of it.
    Raises:
        FileNotFoundError: no whole state is there.
        DamagedCheckpointError: a file of the state is missing, cut short or cannot be read.
    """
    file_system, root = fsspec.url_to_fs(str(path))
    name = _current(file_system, root)
    if name is None:
        raise FileNotFoundError(f"{path}: no complete checkpoint")
    state = f"{root}/{name}"
    url = file_system.unstrip_protocol(state) if "://" in str(path) else state
    try:
        with file_system.open(f"{state}/{META}", "rb") as file:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        reader = FsspecReader(url)
        metadata = reader.read_metadata()
        _require_files(file_system, state, metadata)
        if into is not None:
            _load_state_dict(cast(Any, dict(into)), reader, no_dist=True, planner=_LoadPlanner())
            return checkpoint
        tensors = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        _load_state_dict(cast(Any, tensors), reader, no_dist=True)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{error.filename or error} is missing") from error
    except CheckpointException as error:
        ((cause, _), *_) = error.failures.values()
        raise DamagedCheckpointError(f"{state} cannot be read ({type(cause).__name__})") from error
    for key, tensor in tensors.items():
        _put(checkpoint, _keys(key), tensor)
    return checkpoint


def _require_files(file_system: Any, state: str, metadata: Metadata) -> None:
    """Raises DamagedCheckpointError where a file ends before what is said to be in it, without reading any."""
    ends: dict[str, int] = {}
    for part in (metadata.storage_data or {}).values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        if file_system.info(f"{state}/{name}")["size"] < end:
            raise DamagedCheckpointError(f"{state}/{name} is cut short")


def _leaves(tree: Any, keys: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], HostShards]]:
    if isinstance(tree, HostShards):
        yield keys, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, (*keys, key))
    elif isinstance(tree, (list, tuple)):
        for i, value in enumerate(tree):
            yield from _leaves(value, (*keys, i))


def _without_shards(tree: Any) -> Any:
    """The same tree with None in place of each tensor in parts."""
    if isinstance(tree, HostShards):
        return None
    if isinstance(tree, Mapping):
        return {key: _without_shards(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_without_shards(value) for value in tree)
    return tree


def key_of(keys: tuple[str | int, ...]) -> str:
    """A path in the tree as one string; `#` before a number keeps it apart from the same digits as a name."""
    return "/".join(f"#{key}" if isinstance(key, int) else key for key in keys)


def _keys(key: str) -> list[str | int]:
    return [int(part[1:]) if part.startswith("#") else part for part in key.split("/")]


def _put(tree: Any, keys: Sequence[str | int], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree[key]
    tree[keys[-1]] = value


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)  # NaN equals itself


def _current(file_system: Any, root: str) -> str | None:
    try:
        return file_system.cat_file(f"{root}/{POINTER}").decode().strip()
    except FileNotFoundError:
        return None


def _is_local(file_system: Any) -> bool:
    protocol = file_system.protocol
    return "file" in (protocol if isinstance(protocol, tuple) else (protocol,))


def _point_to(file_system: Any, root: str, name: str) -> None:
    """Writes the pointer in one operation: an object store's put, or a rename."""
    if not _is_local(file_system):
        file_system.pipe_file(f"{root}/{POINTER}", name.encode())
        return
    temporary = f"{root}/.{POINTER}"
    with open(temporary, "w") as file:
        file.write(name)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, f"{root}/{POINTER}")


def _remove(file_system: Any, path: str) -> None:
    if file_system.exists(path):
        file_system.rm(path, recursive=True)
