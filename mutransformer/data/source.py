"""Where documents come from, and which of them are held out. Read by `cache.py` and `datamodule.py`.

Four sources are local (`stdlib`, `text`, `json`, `parquet`); any other name is a dataset on the Hugging Face hub.
A split is a hub dataset's own, or a share of the documents, chosen by a hash (of a file's relative path, of a row's
text): the same documents on every machine, at any batch size and number of hosts. `files.py` reads text files,
`rows.py` tables; both can go on from any batch.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Literal

from mutransformer.data.files import FileReader
from mutransformer.data.reader import Reader
from mutransformer.data.rows import FileRowReader, HubReader
from mutransformer.errors import ConfigError, require_positive

Split = Literal["train", "validation", "test"]

FILE_SOURCES = ("text", "json", "parquet")
LOCAL_SOURCES = ("stdlib", *FILE_SOURCES)
HUB_FIELDS = {"name": None, "revision": None, "train_split": "train", "validation_split": None, "test_split": None}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


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
        by_source = {"stdlib": FileReader, "text": FileReader, "json": FileRowReader, "parquet": FileRowReader}
        return by_source.get(self.source.dataset, HubReader)(self)
