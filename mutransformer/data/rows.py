"""Rows of tables as documents, streamed by `datasets`: local JSON and Parquet, or the hub. Read by `source.py`.

A stream's own state is a part of the position, so going on reads no file that was read before. No shuffle buffer is
used: it would lose and double rows where a stream goes on.
"""

from __future__ import annotations

import http.client
import logging
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from mutransformer.data.files import find_files, sizes_and_times
from mutransformer.data.reader import Batch, Reader, SourceAbsent
from mutransformer.errors import ConfigError, DataError

# Waits between attempts that make no progress. Each attempt is up to six requests of the hub's own client, 24 s.
RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRANSIENT_STATUS = (408, 425, 429)
# of httpx, aiohttp and requests, whichever the installed client of the hub uses
_TRANSIENT_NAMES = {"TransportError", "ClientConnectionError", "ClientPayloadError", "ConnectionError", "Timeout"}


class RowReader(Reader):
    """Each row's text column is a document; null is left out."""

    _stream: Any = None

    def load(self) -> Any:
        """Returns the `datasets.IterableDataset` of all rows."""
        raise NotImplementedError

    def failed(self, error: Exception, n_read: int) -> Exception:
        """The error to raise where the stream raised `error` after `n_read` documents."""
        raise NotImplementedError

    def documents(self, position: dict[str, Any]) -> Iterator[tuple[bytes, bytes]]:
        n_read = position.get("n_read", 0)
        for library in ("datasets", "huggingface_hub"):  # what they would log is said once, in our own errors
            logging.getLogger(library).setLevel(logging.CRITICAL)
        try:
            self._stream = self.load()
            if "stream" in position:
                self._stream.load_state_dict(position["stream"])
            for row in self._stream:
                text = self._text_of(row, n_read)
                yield text, text
                n_read += 1
        except (ConfigError, DataError):
            raise
        except Exception as error:  # pyarrow, json, fsspec, the hub's client: each has errors of its own
            raise self.failed(error, n_read) from error

    def position(self) -> dict[str, Any]:
        return {"stream": self._stream.state_dict()}

    def _text_of(self, row: dict[str, Any], number: int) -> bytes:
        column = self.source.text_column
        if column not in row:
            rule, remedy = "no such column", f"the columns are {', '.join(sorted(row))}"
            raise ConfigError("data.text_column", column, rule, remedy)
        if (text := row[column]) is not None and not isinstance(text, str):
            rule = f"must name a column of text, and document {number} is {type(text).__name__}: {str(text)[:40]!r}"
            raise ConfigError("data.text_column", column, rule, f"the columns are {', '.join(sorted(row))}")
        return (text or "").encode(errors="replace")


class FileRowReader(RowReader):
    """Rows of local JSON or Parquet files."""

    def state_of_source(self) -> dict[str, Any]:
        return {"files": sizes_and_times(find_files(self.source.data_files))}

    def load(self) -> Any:
        from datasets import load_dataset

        self._files = [str(path) for _, path in find_files(self.source.data_files)]
        return load_dataset(self.source.dataset, data_files=self._files, split="train", streaming=True)

    def failed(self, error: Exception, n_read: int) -> Exception:
        kind, state = self.source.dataset, {} if self._stream is None else self._stream.state_dict()
        while isinstance(state.get("examples_iterable"), dict):
            state = state["examples_iterable"]
        number = min(state.get("shard_idx", 0), len(self._files) - 1)
        rule = f"could not be read ({_first_line(error)}) after {n_read} documents, in or after {self._files[number]}"
        return ConfigError("data.data_files", self.source.data_files, rule, f"check that every file is {kind}")


class HubReader(RowReader):
    """Rows of a dataset on the Hugging Face hub, at one commit."""

    _commit: str | None = None

    def state_of_source(self) -> dict[str, Any]:
        return {"revision": self.commit()}

    def commit(self) -> str:
        """The commit that `data.revision` means now; asked of the hub once, and not at all where it is a commit."""
        revision = self.source.revision
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        if self._commit is None:
            self._commit = str(self._patiently(lambda: self._ask_for_commit(revision)))
        return self._commit

    def _ask_for_commit(self, revision: str | None) -> str:
        from huggingface_hub import HfApi

        return str(HfApi().dataset_info(self.source.dataset, revision=revision).sha)

    def _patiently(self, ask: Any) -> Any:
        for delay in (*RETRY_DELAYS_S, None):
            try:
                return ask()
            except Exception as error:
                if not is_transient(error):
                    raise self.failed(error, 0) from error
                if delay is None:
                    raise SourceAbsent(
                        f"data.dataset={self.source.dataset!r}: the hub cannot be reached ({_first_line(error)}); the "
                        "same command goes on when it can, and a commit as data.revision needs it only to read"
                    ) from error
                _wait(delay, error)

    def load(self) -> Any:
        from datasets import config, load_dataset

        # One attempt of theirs for one of ours: with 20, each of several requests, a fault that lasts would take hours.
        config.STREAMING_READ_MAX_RETRIES = config.STREAMING_OPEN_MAX_RETRIES = 1
        source = self.source
        return load_dataset(
            source.dataset, source.name, revision=self.commit(), split=self.reading.source_split, streaming=True
        )

    def batches(self, position: dict[str, Any]) -> Iterator[Batch]:
        """Yields the batches from a position on; a fault of the network is tried again from the last batch."""
        attempt = 0
        while True:
            try:
                for batch in super().batches(position):
                    yield batch
                    position, attempt = batch.position, 0
                return
            except _Fault as fault:
                if attempt == len(RETRY_DELAYS_S):
                    n_read = position.get("n_read", 0)
                    raise DataError(
                        f"data.dataset={self.source.dataset!r}: reading failed after document {n_read}, {attempt + 1} "
                        f"times ({_first_line(fault.error)}); the same command goes on from the last whole shard"
                    ) from fault.error
                _wait(RETRY_DELAYS_S[attempt], fault.error)
                attempt += 1

    def done(self, n_read: int) -> float | None:
        if (share := super().done(n_read)) is not None:
            return share
        splits = self._stream.info.splits
        if splits and (n_rows := getattr(splits.get(self.reading.source_split), "num_examples", None)):
            return min(1.0, n_read / n_rows)
        return None

    def failed(self, error: Exception, n_read: int) -> Exception:
        if is_transient(error):
            return _Fault(error)
        remedy = "check data.dataset, data.name, data.revision, the names of the splits, and your access (HF_TOKEN)"
        rule = f"could not be read ({_first_line(error)})"
        return ConfigError("data.dataset", self.source.dataset, rule, remedy)


class _Fault(Exception):
    """A fault of the network or the hub that may pass."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: the network, a server's fault or too many requests; not 403, 404 and the like."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    statuses = [status for link in chain if (status := _status_of(link)) is not None]
    if statuses:
        return statuses[0] >= 500 or statuses[0] in _TRANSIENT_STATUS
    if isinstance(error, FileNotFoundError):
        return False
    return any(
        isinstance(link, (ConnectionError, TimeoutError, http.client.HTTPException))
        or any(cls.__name__ in _TRANSIENT_NAMES for cls in type(link).__mro__)
        for link in chain
    )


def _status_of(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "status", None)
    return status if isinstance(status, int) else None


def _wait(delay_s: float, error: Exception) -> None:
    print(f"hub: {_first_line(error)}; trying again in {delay_s:g} s", file=sys.stderr)
    time.sleep(delay_s)


def _first_line(error: BaseException) -> str:
    return (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
