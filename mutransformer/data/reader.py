"""What reads a source: documents in batches, from any batch on. `files.py` and `rows.py` fill it in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from mutransformer.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mutransformer.data.source import Reading

# A batch is what one call of the tokenizer gets. Where batches end decides where shards end: part of the cache format.
DOCUMENTS_PER_BATCH = 512
BYTES_PER_BATCH = 2**22


class SourceAbsent(DataError):
    """The source cannot be reached from this machine, so it is not known whether it changed.

    Args:
        message: what was looked for.
        mistake: the user's, should there be no cache of the source either; None: there is none.
    """

    def __init__(self, message: str, mistake: ConfigError | None = None) -> None:
        super().__init__(message)
        self.mistake = mistake


@dataclass(frozen=True)
class Batch:
    """Documents that are tokenized together.

    Args:
        documents: (number in the source, from 0 up; our split; text), empty ones left out.
        position: what `Reader.batches` goes on from to give the next batch.
        n_read: documents read so far, empty ones too.
        n_empty: empty documents among these of this batch.
        done: share of the source read so far, from 0 to 1; None where that is not known.
    """

    documents: list[tuple[int, str, bytes]]
    position: dict[str, Any]
    n_read: int
    n_empty: int
    done: float | None


class Reader:
    """Reads documents in batches, from the beginning or from any position that a batch gave.

    Args:
        reading: what to read.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.source = reading.source

    def state_of_source(self) -> dict[str, Any]:
        """Returns what changes when the source does: a part of the key.

        Raises:
            ConfigError: when there is no such source.
            SourceAbsent: when it cannot be reached from here.
        """
        raise NotImplementedError

    def documents(self, position: dict[str, Any]) -> Iterator[tuple[bytes, bytes]]:
        """Yields (what the split is decided by, text) from a position on; an empty text for one that is left out."""
        raise NotImplementedError

    def position(self) -> dict[str, Any]:
        """What `documents` needs beside the number of documents read, to go on behind the one just yielded."""
        return {}

    def done(self, n_read: int) -> float | None:
        """Share of the source that is read after `n_read` documents; None where that is not known."""
        limit = self.source.max_documents
        return None if limit is None else min(1.0, n_read / limit)

    def batches(self, position: dict[str, Any]) -> Iterator[Batch]:
        """Yields the batches from a position on; `{}` is the beginning.

        Raises:
            ConfigError: when the source cannot be read.
            DataError: when it could be read in part; the same command goes on.
        """
        n_read = position.get("n_read", 0)
        documents = self.documents(position)
        if self.source.max_documents is not None:
            documents = islice(documents, self.source.max_documents - n_read)
        while batch := list(_limited(documents)):
            kept = [(n_read + i, self.reading.split_of(key), text) for i, (key, text) in enumerate(batch) if text]
            n_read += len(batch)
            yield Batch(kept, {"n_read": n_read, **self.position()}, n_read, len(batch) - len(kept), self.done(n_read))


def _limited(documents: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """The documents of the next batch."""
    n_bytes = 0
    for document in islice(documents, DOCUMENTS_PER_BATCH):
        yield document
        n_bytes += len(document[1])
        if n_bytes >= BYTES_PER_BATCH:
            return
