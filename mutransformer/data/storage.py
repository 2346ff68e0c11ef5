"""Folders and the lock of a cache, on a local disk or on an object store. Read by `writer.py` and `cache.py`.

Every write is whole or has not happened: a local file is written under another name, flushed to the disk and renamed;
an object store puts an object at once. Nothing is ever moved on an object store.
"""

from __future__ import annotations

import io
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from mutransformer.errors import ConfigError, DataError, Interrupted, SaveError

HEARTBEAT_S = 15.0
_TEMPORARY = ".tmp"  # ends the names of local files that are not whole yet
STALE_S = 120.0  # a lock of another machine whose heartbeat stood still as long is taken over


def default_cache() -> Path:
    """The user's own folder for token caches: `$MUTRANSFORMER_CACHE`, or `mutransformer` in `$XDG_CACHE_HOME`."""
    own = os.environ.get("MUTRANSFORMER_CACHE")
    return Path(own or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mutransformer").expanduser()


class Folder:
    """A folder by its path, local (`~` is the home) or a URL that fsspec can open, as `gs://bucket/folder`.

    Raises:
        ConfigError: when it is a file, the kind of URL is not known, or the package for it is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = os.path.expanduser(os.fspath(path))
        protocol = path.partition("://")[0] if "://" in path else "file"
        # a listing kept in memory would miss what others write
        options = {} if protocol in ("file", "local") else {"use_listings_cache": False}
        try:
            self._fs, self._root = fsspec.core.url_to_fs(path, **options)
        except (ImportError, ValueError) as error:
            remedy = (
                'pip install "mutransformer[gcs]"' if protocol in ("gs", "gcs") else "give a local path or gs://..."
            )
            raise ConfigError("data.cache", path, f"cannot be opened ({error})", remedy) from error
        self.is_local = protocol in ("file", "local")
        self.path = self._root if self.is_local else path.rstrip("/")
        if self.is_local and os.path.isfile(self._root):
            raise ConfigError("data.cache", path, "is a file", "give a folder")

    def __str__(self) -> str:
        return self.path

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.path}/{name}")

    def read(self, name: str) -> bytes:
        """Returns the content of a file.

        Raises:
            FileNotFoundError: when there is none.
            DataError: when it cannot be read, as this and the methods below do.
        """
        with self._reporting(DataError, f"{name} could not be read"):
            return self._fs.cat_file(f"{self._root}/{name}")

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Returns the content of a JSON file; None where there is no such file.

        Raises:
            DataError: when it is no JSON.
        """
        try:
            return json.loads(self.read(name))
        except FileNotFoundError:
            return None
        except ValueError as error:  # also where it is no UTF-8
            raise DataError(f"{self.path}/{name} is damaged ({error}); delete the folder {self.path}") from error

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, or leaves what was there before.

        Raises:
            SaveError: when it cannot be written, e.g. on a full disk.
        """
        with self._reporting(SaveError, f"{name} could not be written", missing_too=True):
            if self.is_local:
                _write_local(Path(self._root, name), content)
            else:
                self._fs.pipe_file(f"{self._root}/{name}", content)

    def write_array(self, name: str, array: np.ndarray) -> bytes:
        """Writes an array as `.npy`, little-endian; returns the bytes written."""
        buffer = io.BytesIO()
        np.save(buffer, array.astype(array.dtype.newbyteorder("<"), copy=False), allow_pickle=False)
        content = buffer.getvalue()
        self.write(name, content)
        return content

    def create(self, name: str, content: bytes) -> bool:
        """Writes a file that is not there; returns False, and does nothing, where it is."""
        try:
            with self._reporting(SaveError, "cannot be written to", missing_too=True):
                if self.is_local:
                    Path(self._root).mkdir(parents=True, exist_ok=True)
                    with open(f"{self._root}/{name}", "xb") as file:
                        file.write(content)
                else:
                    self._fs.pipe_file(f"{self._root}/{name}", content, mode="create")
        except FileExistsError:
            return False
        except SaveError as error:
            reason = f"cannot be written to ({_reason(error.__cause__ or error)})"
            raise ConfigError(
                "data.cache", self.path, reason, "give a folder or bucket that you can write to"
            ) from error
        return True

    def delete(self, name: str) -> None:
        """Deletes a file, if it is there."""
        with suppress(FileNotFoundError), self._reporting(SaveError, f"{name} could not be deleted"):
            self._fs.rm_file(f"{self._root}/{name}")

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is no such file."""
        try:
            with self._reporting(DataError, f"{name} could not be read"):
                return self._fs.info(f"{self._root}/{name}")["size"]
        except FileNotFoundError:
            return None

    def folders(self) -> list[str]:
        """Names of the folders in this one, sorted; none where it does not exist."""
        try:
            with self._reporting(DataError, "could not be read"):
                entries = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return sorted(Path(e["name"].rstrip("/")).name for e in entries if e["type"] == "directory")

    def sweep(self) -> None:
        """Deletes what a killed process had begun to write here; for the holder of the folder's lock."""
        if self.is_local:
            for path in Path(self._root).rglob(f".*{_TEMPORARY}"):
                path.unlink(missing_ok=True)

    @contextmanager
    def _reporting(self, kind: type[Exception], what: str, missing_too: bool = False) -> Iterator[None]:
        """Makes one of our errors of what the file system raises; that a file is missing or there is for callers."""
        try:
            yield
        except (FileExistsError, ConfigError, DataError, SaveError, Interrupted):
            raise
        except Exception as error:  # each object store has errors of its own
            if isinstance(error, FileNotFoundError) and not missing_too:
                raise
            raise kind(f"{self.path}: {what} ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or f"{type(error).__name__}: {error}".splitlines()[0]


def _write_local(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{_TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class Lock:
    """The right to write into a folder: the file `lock.json`, which names its owner and carries a heartbeat.

    A lock whose owner has died is taken over: at once where the owner was a process of this machine, after
    `STALE_S` without a heartbeat where it was not. Should two writers meet all the same (one was suspended for
    minutes), nothing breaks, since both write the same bytes under the same names.

    Args:
        folder: what is to be written into.
    """

    _NAME = "lock.json"

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._owner = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_started": _process_started(os.getpid()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
            "token": uuid.uuid4().hex,
        }
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None
        self._seen: tuple[Any, float] = (None, 0.0)

    def acquire(self) -> dict[str, Any] | None:
        """Takes the lock, from a dead owner too; returns None, or the living owner where there is one."""
        while not self._folder.create(self._NAME, self._content(0)):
            owner = self._read()
            if owner is not None and not self._is_dead(owner):
                return owner
            self._folder.delete(self._NAME)
        self._stop.clear()
        self._heart = threading.Thread(target=self._beat, daemon=True, name="cache lock")
        self._heart.start()
        return None

    def release(self) -> None:
        """Gives the lock back; does nothing where it is another's by now."""
        self._stop.set()
        if self._heart is not None:
            self._heart.join()  # a last beat must not write the lock anew
        if self.is_ours():
            self._folder.delete(self._NAME)

    def is_ours(self) -> bool:
        owner = self._read()
        return owner is not None and owner.get("token") == self._owner["token"]

    def _read(self) -> dict[str, Any] | None:
        """The owner; an empty one while the file is being written, None where there is none."""
        try:
            return self._folder.read_json(self._NAME)
        except DataError:
            return {}

    def _content(self, beat: int) -> bytes:
        return json.dumps({**self._owner, "beat": beat}).encode()

    def _beat(self) -> None:
        beat = 0
        while not self._stop.wait(HEARTBEAT_S):
            beat += 1
            try:
                if self.is_ours() and not self._stop.is_set():
                    self._folder.write(self._NAME, self._content(beat))
            except (OSError, SaveError):  # the writer itself meets it too, and says so
                pass

    def _is_dead(self, owner: dict[str, Any]) -> bool:
        if owner.get("host") == self._owner["host"]:
            pid = owner.get("pid")
            return not isinstance(pid, int) or _process_started(pid) != owner.get("process_started")
        beat = (owner.get("token"), owner.get("beat"))
        if beat != self._seen[0]:  # times are compared on this machine's clock alone
            self._seen = (beat, time.monotonic())
        return time.monotonic() - self._seen[1] > STALE_S


def _process_started(pid: int) -> str | None:
    """When a process of this machine started; None where there is no such process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "?"  # no /proc on this system: the number alone must do
    return None if fields[0] == "Z" else fields[19]
