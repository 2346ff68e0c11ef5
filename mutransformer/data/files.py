"""Text files as documents: those of Python's standard library, or the user's own. Read by `source.py`."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from mutransformer.data.reader import Reader, SourceAbsent
from mutransformer.errors import ConfigError, DataError

_STDLIB_FILE = re.compile(r"(?!_sysconfigdata_).*\.py")  # that one is written where Python was built
_NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

File = tuple[str, Path]  # path relative to the fixed part of the pattern that matched, path


class FileReader(Reader):
    """Each file is a document, whatever bytes it holds, in the order of the patterns, then of the relative paths."""

    @cached_property
    def files(self) -> list[File]:
        return stdlib_files() if self.source.dataset == "stdlib" else find_files(self.source.data_files)

    def state_of_source(self) -> dict[str, Any]:
        return {"files": contents(self.files) if self.source.dataset == "stdlib" else sizes_and_times(self.files)}

    @cached_property
    def _sizes(self) -> list[int]:
        """Bytes of the files up to each, for the share that is read."""
        total, sizes = 0, []
        for _, path in self.files:
            total += path.stat().st_size
            sizes.append(total)
        return sizes

    def documents(self, position: dict[str, Any]) -> Iterator[tuple[bytes, bytes]]:
        for relative, path in self.files[position.get("n_read", 0) :]:
            try:
                text = path.read_bytes()
            except OSError as error:
                raise DataError(
                    f"{path} could not be read ({error.strerror}); mend that, and the same command "
                    "goes on from the last whole shard"
                ) from error
            yield os.fsencode(relative), text

    def done(self, n_read: int) -> float | None:
        limit = len(self.files) if self.source.max_documents is None else self.source.max_documents
        n_bytes = self._sizes[min(limit, len(self.files)) - 1]
        return self._sizes[n_read - 1] / n_bytes if n_bytes else 1.0


def stdlib_files() -> list[File]:
    """The sources of Python's standard library without its tests, as (relative path, path) sorted by the former."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_CORPUS]
        files += [Path(folder, name) for name in names if _STDLIB_FILE.fullmatch(name)]
    return sorted((path.relative_to(root).as_posix(), path) for path in files)


def find_files(data_files: str | list[str] | None) -> list[File]:
    """The files that `data.data_files` names, each once.

    Raises:
        ConfigError: when a pattern names a directory.
        SourceAbsent: when no file matches one.
    """
    patterns = [data_files] if isinstance(data_files, str) else data_files or []
    found: dict[Path, str] = {}
    for pattern in patterns:
        matches = _matches(pattern)
        if not matches:
            remedy = "give a file's path, or a glob such as 'books/**/*.txt'"
            if os.path.isdir(os.path.expanduser(pattern)):
                raise ConfigError("data.data_files", pattern, "names a directory", remedy)
            mistake = ConfigError("data.data_files", pattern, "no file has this path or matches this glob", remedy)
            raise SourceAbsent(str(mistake), mistake)
        for relative, path in matches:
            found.setdefault(path, relative)
    return [(relative, path) for path, relative in found.items()]


def sizes_and_times(files: list[File]) -> dict[str, Any]:
    """What changes when one of the files is written again: names, sizes and times of all."""
    stats = [(relative, (stat := path.stat()).st_size, stat.st_mtime_ns) for relative, path in files]
    return {"n": len(files), "n_bytes": sum(size for _, size, _ in stats), "sha256": _sha256(stats)}


def contents(files: list[File]) -> dict[str, Any]:
    """What changes when one of the files has another content: the same on every machine."""
    hashes = [(relative, hashlib.sha256(path.read_bytes()).hexdigest()) for relative, path in files]
    return {"n": len(files), "sha256": _sha256(hashes)}


def _sha256(values: object) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _matches(pattern: str) -> list[File]:
    """The files a path or glob names, as (path relative to the part before the first wildcard, path), sorted."""
    pattern = os.path.expanduser(pattern)
    if os.path.isfile(pattern):  # also where the name itself holds a bracket
        return [(Path(pattern).name, Path(pattern))]
    parts = Path(pattern).parts
    n_fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    root = Path(*parts[:n_fixed])
    files = [Path(match) for match in glob.glob(pattern, recursive=True) if os.path.isfile(match)]
    return sorted((path.relative_to(root).as_posix(), path) for path in files)
