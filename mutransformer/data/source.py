"""Where documents come from, and which of them are held out. Read by `cache.py` and `datamodule.py`.

Four sources are local (`stdlib`, `text`, `json`, `parquet`); any other name is a dataset on the Hugging Face hub.
A split is a hub dataset's own, or a share of the documents, chosen by a hash (of a file's relative path, of a row's
text): the same documents on every machine, at any batch size and number of hosts. `files.py` reads text files,
`rows.py` tables; both can go on from any batch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from mutransformer.errors import ConfigError, DataError, require_positive

Split = Literal["train", "validation", "test"]

FILE_SOURCES = ("text", "json", "parquet")
LOCAL_SOURCES = ("stdlib", *FILE_SOURCES)
HUB_FIELDS = {"name": None, "revision": None, "train_split": "train", "validation_split": None, "test_split": None}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

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


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The documents of one dataset; its fields are those of `TextDataModule`, which explains them.

    Raises:
        ConfigError: when a value cannot work or two do not go together; the message gives the field to set.
            Nothing is looked up here.
    """

    dataset: str = "stdlib"
    name: str | None = None
    revision: str | None = None
    data_files: str | list[str] | None = None
    train_split: str = "train"
    validation_split: str | None = None
    test_split: str | None = None
    validation_fraction: float = 0.05
    test_fraction: float = 0.0
    text_column: str = "text"
    max_documents: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            rule, remedy = "must lie between 0 and 1, ends left out", "use 0.05"
            raise ConfigError("data.validation_fraction", self.validation_fraction, rule, remedy)
        if not 0 <= self.test_fraction < 1 - self.validation_fraction:
            rule = "must not be negative, and leave documents to train on beside data.validation_fraction"
            raise ConfigError("data.test_fraction", self.test_fraction, rule, "use 0.05, or 0 for no test split")
        if self.test_split is not None and self.test_fraction:
            rule = "is for datasets without a test split, and data.test_split is given"
            raise ConfigError("data.test_fraction", self.test_fraction, rule, "leave one of them out")
        require_positive("data", max_documents=self.max_documents)
        if self.dataset in LOCAL_SOURCES:
            self._check_local()
        else:
            self._check_hub()

    def readings(self) -> list[Reading]:
        """Returns what has to be read: one split of the source each, which holds one or more of ours."""
        shares = {"validation": self.validation_fraction, "test": self.test_fraction}
        official = {"validation": self.validation_split, "test": self.test_split}
        held_out = {name: share for name, share in shares.items() if share and official[name] is None}
        return [
            Reading(self, self.train_split, "train", held_out),
            *(Reading(self, split, name, {}) for name, split in official.items() if split is not None),
        ]

    def _check_local(self) -> None:
        for field, default in HUB_FIELDS.items():
            if (value := getattr(self, field)) != default:
                rule = f"belongs to hub datasets and does nothing where data.dataset is {self.dataset!r}"
                raise ConfigError(f"data.{field}", value, rule, "leave it out")
        if self.dataset in FILE_SOURCES and not self.data_files:
            rule = f"must name the files of data.dataset={self.dataset!r}"
            raise ConfigError("data.data_files", self.data_files, rule, "give a path, a glob such as 'books/**/*.txt'")
        if self.dataset == "stdlib" and self.data_files is not None:
            self._refuse_files()

    def _check_hub(self) -> None:
        if not _HUB_ID.fullmatch(self.dataset):
            rule = f"must be one of {', '.join(LOCAL_SOURCES)} or a hub id such as 'owner/name'"
            raise ConfigError(
                "data.dataset", self.dataset, rule, "for local files use data.dataset=text and data.data_files"
            )
        if self.data_files is not None:
            self._refuse_files()
        for field, others in (("validation_split", ("train",)), ("test_split", ("train", "validation"))):
            for other in others:
                if (value := getattr(self, field)) is not None and value == getattr(self, f"{other}_split"):
                    rule = f"is data.{other}_split too: it would measure on the same documents"
                    raise ConfigError(f"data.{field}", value, rule, "name another split or leave it out")

    def _refuse_files(self) -> None:
        rule = f"is read only where data.dataset is one of {', '.join(FILE_SOURCES)}, not {self.dataset!r}"
        raise ConfigError("data.data_files", self.data_files, rule, "leave it out or change data.dataset")


@dataclass(frozen=True)
class Reading:
    """One pass over one split of the source.

    Args:
        source: what to read.
        source_split: split of a hub dataset; `train` for local sources.
        rest: our split that gets every document which is not held out.
        held_out: our split -> share of the documents that go there.
    """

    source: TextSource
    source_split: str
    rest: str
    held_out: dict[str, float]

    @property
    def splits(self) -> tuple[str, ...]:
        """Our splits that this reading fills."""
        return (self.rest, *self.held_out)

    def split_of(self, key: bytes) -> str:
        """The split of a document, by a hash of `key`."""
        place = int.from_bytes(hashlib.sha256(key).digest()[:8], "big") / 2**64
        for split, share in self.held_out.items():
            if place < share:
                return split
            place -= share
        return self.rest

    def settings(self) -> dict[str, Any]:
        """What of the source the tokens depend on, but the state it is in (`Reader.state_of_source`)."""
        source = self.source
        is_hub, is_table = source.dataset not in LOCAL_SOURCES, source.dataset not in ("stdlib", "text")
        return {
            "dataset": source.dataset,
            "name": source.name,
            "split": self.source_split if is_hub else None,
            "text_column": source.text_column if is_table else None,
            "max_documents": source.max_documents,
            "holds": {**self.held_out, self.rest: "rest"},
        }

    def reader(self) -> Reader:
        """Returns what reads it."""
        from mutransformer.data.files import FileReader
        from mutransformer.data.rows import FileRowReader, HubReader

        by_source = {"stdlib": FileReader, "text": FileReader, "json": FileRowReader, "parquet": FileRowReader}
        return by_source.get(self.source.dataset, HubReader)(self)


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
