"""Finds the cache of a reading, makes it where there is none, brings it to this machine. Read by `datamodule.py`.

Any number of processes may ask for the same cache: one takes the lock and writes, the others wait for its manifest.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from mutransformer.data.manifest import FORMAT, MANIFEST, PROGRESS, Manifest, folder_name
from mutransformer.data.reader import SourceAbsent
from mutransformer.data.source import Reading
from mutransformer.data.storage import Folder, Lock, default_cache
from mutransformer.data.tokenizer import Tokenizer
from mutransformer.data.writer import CacheWriter, LostLock, Report
from mutransformer.errors import ConfigError, DataError

POLL_S = 1.0
_SPARE_BYTES = 2**26  # left free on a disk that shards are copied to
_COPIES_AT_ONCE = 4
_STATE_OF_SOURCE = ("files", "revision")  # settings that only the source itself can tell


@dataclass(frozen=True, kw_only=True)
class CacheRequest:
    """A cache that somebody wants.

    Args:
        root: folder of caches, local or remote.
        reading: what it is to hold.
        tokenizer: makes its ids.
        tokenizer_name: as typed.
        separator: id before, between and after documents.
        vocab_size: every id must be below it.
    """

    root: Folder
    reading: Reading
    tokenizer: Tokenizer
    tokenizer_name: str
    separator: int
    vocab_size: int

    def settings(self, state_of_source: dict[str, Any]) -> dict[str, Any]:
        """What the tokens depend on; the key of the cache is its hash."""
        return {
            "format": FORMAT,
            **self.reading.settings(),
            **state_of_source,
            "tokenizer": self.tokenizer.content_sha256,
            "separator": self.separator,
        }

    def about(self) -> dict[str, Any]:
        """The settings as they were typed, where the key has what they stand for."""
        source = self.reading.source
        return {"tokenizer": self.tokenizer_name, "data_files": source.data_files, "revision": source.revision}

    def ensure(self, report: Report) -> tuple[Folder, Manifest]:
        """Returns the complete cache; writes it, or waits for whoever writes it, where there is none.

        Args:
            report: called with the progress of writing.
        Raises:
            ConfigError: when the source or a setting cannot work.
            DataError, SaveError, Interrupted: when writing stopped half-way.
        """
        reader = self.reading.reader()
        try:
            settings = self.settings(reader.state_of_source())
        except SourceAbsent as error:
            return self._made_before(error)
        folder = self.root / folder_name(settings)
        lock, is_announced = Lock(folder), False
        while (manifest := complete(folder, settings)) is None:
            if (owner := lock.acquire()) is not None:
                if not is_announced:
                    is_announced = True
                    print(f"waiting for {folder}: {_describe(owner)} writes it", file=sys.stderr, flush=True)
                time.sleep(POLL_S)
                continue
            try:
                if (manifest := complete(folder, settings)) is None:  # finished just before we had the lock
                    new = Manifest(settings, self.about(), self._dtype())
                    writer = CacheWriter(folder, reader, self.tokenizer, new, vocab_size=self.vocab_size, lock=lock)
                    manifest = writer.write(report)
                return folder, manifest
            except LostLock:
                continue
            finally:
                lock.release()
        return folder, manifest

    def _dtype(self) -> str:
        return "uint16" if max(len(self.tokenizer), self.separator + 1) <= 2**16 else "uint32"

    def _made_before(self, absence: SourceAbsent) -> tuple[Folder, Manifest]:
        """The only complete cache of these settings, where the source itself cannot be asked whether it changed."""
        ours, typed = self.settings({}), self.about()
        found = []
        for folder in caches(self.root):
            manifest = Manifest.load(folder)
            if manifest is None:
                continue
            settings = {key: value for key, value in manifest.settings.items() if key not in _STATE_OF_SOURCE}
            if settings == ours and all(manifest.about.get(key) == typed[key] for key in ("data_files", "revision")):
                found.append((folder, manifest))
        if len(found) == 1:
            print(f"{found[0][0]} is used: the source is not at hand ({absence})", file=sys.stderr)
            return found[0]
        if not found:
            raise absence.mistake or absence
        names = ", ".join(str(folder) for folder, _ in found)
        raise DataError(f"{absence}; several caches of it are there ({names}): delete all but one") from absence


def complete(folder: Folder, settings: dict[str, Any]) -> Manifest | None:
    """Returns the manifest of a complete cache with these settings; None where there is none.

    Raises:
        DataError: when the folder holds a cache of other settings.
    """
    manifest = Manifest.load(folder)
    if manifest is not None and manifest.settings != settings:
        raise DataError(f"{folder} holds tokens made under other settings; give it its own name or delete it")
    return manifest


def caches(root: Folder) -> Iterator[Folder]:
    """Yields the folders of caches, complete or not, in a folder of caches."""
    for name in root.folders():
        folder = root / name
        if folder.size(MANIFEST) is not None or folder.size(PROGRESS) is not None:
            yield folder


def damages(folder: Folder, manifest: Manifest, *, by_hash: bool) -> Iterator[str]:
    """Yields a line for each file that is missing, too short or too long or, by hash, has another content.

    Args:
        folder: of the cache.
        manifest: of the cache.
        by_hash: read all files; else sizes alone are compared.
    """
    for file, n_bytes, sha256 in _files(manifest):
        size = folder.size(file)
        if size is None:
            yield f"{folder}/{file} is missing"
        elif size != n_bytes:
            yield f"{folder}/{file} is damaged: it has {size:,} bytes, {n_bytes:,} were written"
        elif by_hash and hashlib.sha256(folder.read(file)).hexdigest() != sha256:
            yield f"{folder}/{file} is damaged: its content is not what was written (SHA-256)"


def _files(manifest: Manifest) -> Iterator[tuple[str, int, str]]:
    """(path in the folder, bytes, SHA-256) of each file of tokens or document starts."""
    for shards in manifest.splits.values():
        for shard in shards:
            yield from zip(shard.files, shard.file_bytes, shard.sha256, strict=True)


def bring_here(folder: Folder, manifest: Manifest) -> Folder:
    """Returns a local folder with the cache: `folder` itself, or a copy whose every file has the right hash.

    The copy is a cache like any other; a part of it that is there already is not read again.

    Raises:
        ConfigError: when the disk is too small.
        DataError: when a file of the remote cache is damaged.
    """
    if folder.is_local:
        if (damage := next(damages(folder, manifest, by_hash=False), None)) is not None:
            raise DataError(f"{damage}; delete {folder} to have it written again")
        return folder
    copy = Folder(default_cache()) / folder_name(manifest.settings)
    lock = Lock(copy)
    while complete(copy, manifest.settings) is None:
        if lock.acquire() is not None:
            time.sleep(POLL_S)
            continue
        try:
            _copy(folder, manifest, copy)
        finally:
            lock.release()
    return bring_here(copy, manifest)


def _copy(folder: Folder, manifest: Manifest, copy: Folder) -> None:
    files = [file for file in _files(manifest) if copy.size(file[0]) != file[1]]
    n_missing = sum(n_bytes for _, n_bytes, _ in files)
    free = shutil.disk_usage(copy.path).free
    if free < n_missing + _SPARE_BYTES:
        rule = f"{n_missing / 2**30:.2f} GiB of it are to be copied to {copy}, where {free / 2**30:.2f} GiB are free"
        raise ConfigError("data.cache", str(folder), rule, "set MUTRANSFORMER_CACHE to a folder on a larger disk")
    print(f"copying {n_missing / 2**20:,.0f} MiB of {folder} to {copy}", file=sys.stderr, flush=True)

    def copy_one(file: tuple[str, int, str]) -> None:
        name, _, sha256 = file
        content = folder.read(name)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise DataError(f"{folder}/{name} is damaged: its content is not what was written; delete {folder}")
        copy.write(name, content)

    with ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
        for _ in pool.map(copy_one, files):
            pass
    manifest.save(copy, MANIFEST)


def open_shards(folder: Folder, manifest: Manifest, split: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns (tokens, document starts) of each shard of a split, mapped and not read."""
    shards = manifest.splits[split]
    _allow_open_files(2 * len(shards))
    tokens = [_open_array(folder, shard.files[0], is_mapped=True) for shard in shards]
    # an array of nothing cannot be mapped
    starts = [_open_array(folder, shard.files[1], is_mapped=shard.n_documents > 0) for shard in shards]
    return tokens, starts


def _open_array(folder: Folder, name: str, *, is_mapped: bool) -> np.ndarray:
    try:
        return np.load(os.path.join(folder.path, name), mmap_mode="r" if is_mapped else None)
    except (ValueError, EOFError) as error:
        raise DataError(f"{folder}/{name} is damaged; delete the folder {folder}, and it is made anew") from error


def _allow_open_files(n: int) -> None:
    """Lifts this process's soft limit of open files, as each mapped file counts as one."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = n + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _describe(owner: dict[str, Any]) -> str:
    if not owner:
        return "another process"
    return f"process {owner['pid']} on {owner['host']} (since {owner['since']})"
