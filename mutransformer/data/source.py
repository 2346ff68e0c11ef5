"""Where documents come from, and which of them are held out for validation. Read by `datamodule.py`.

Four sources are local (`stdlib`, `text`, `json`, `parquet`); any other name is a dataset on the Hugging Face hub.
Unless the hub dataset has a validation split of its own, a document is held out by a hash (of its relative path,
or of its text where it is a row of a table): the same documents on every machine, whatever else lies beside them.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from mutransformer.errors import ConfigError, require_positive

Split = Literal["train", "validation"]

FILE_SOURCES = ("text", "json", "parquet")
LOCAL_SOURCES = ("stdlib", *FILE_SOURCES)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_STDLIB_FILE = re.compile(r"(?!_sysconfigdata_).*\.py")  # that one is written where Python was built
_NOT_CORPUS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The documents of one dataset; its fields are those of `TextDataModule`, which explains them.

    Raises:
        ConfigError: when a value cannot work or two do not go together; the message gives the field to set.
            Nothing but the existence of `data_files` is looked up here.
    """

    dataset: str = "stdlib"
    name: str | None = None
    revision: str | None = None
    data_files: str | list[str] | None = None
    train_split: str = "train"
    validation_split: str | None = None
    validation_fraction: float = 0.05
    text_column: str = "text"
    max_documents: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.validation_fraction < 1:
            rule, remedy = "must lie between 0 and 1, ends left out", "use 0.05"
            raise ConfigError("data.validation_fraction", self.validation_fraction, rule, remedy)
        require_positive("data", max_documents=self.max_documents)
        self._check_hub_fields()
        if self.dataset in FILE_SOURCES:
            self._files()
        elif self.data_files is not None:
            rule = f"is read only where data.dataset is one of {', '.join(FILE_SOURCES)}, not {self.dataset!r}"
            raise ConfigError("data.data_files", self.data_files, rule, "leave it out or change data.dataset")

    def documents(self, split: Split) -> Iterator[bytes]:
        """Yields the documents of one split, in an order that every process and machine repeats.

        Empty documents and rows whose text is null are left out.

        Args:
            split: `train` or `validation`.
        Returns:
            An iterator of documents, UTF-8 as far as their source is.
        Raises:
            ConfigError: when the source cannot be read, has no such text column, or the split holds no document.
        """
        n_read = n_documents = 0
        for key, content in islice(self._candidates(split), self.max_documents):
            n_read += 1
            if self.validation_split is None and self._is_held_out(key) != (split == "validation"):
                continue
            document = content if isinstance(content, bytes) else content.read_bytes()
            if document:
                n_documents += 1
                yield document
        if n_documents == 0:
            if n_read == 0 or self.validation_split is not None:
                rule = f"holds no document to {'train' if split == 'train' else 'validate'} on"
                raise ConfigError("data.dataset", self.dataset, rule, "check that it holds text")
            rule = f"leaves no document in the {split} split, of {n_read} read from data.dataset={self.dataset!r}"
            remedy = "give more documents (a text file counts as one) or another fraction"
            raise ConfigError("data.validation_fraction", self.validation_fraction, rule, remedy)

    def _candidates(self, split: Split) -> Iterator[tuple[bytes, bytes | Path]]:
        """Yields (what the split is decided by, the document or the file that holds it)."""
        if self.dataset == "stdlib" or self.dataset == "text":
            files = _stdlib_files() if self.dataset == "stdlib" else self._files()
            yield from ((relative.encode(), path) for relative, path in files)
        else:
            for row in self._rows(split):
                if (text := self._text_of(row)) is not None:
                    document = text.encode()
                    yield document, document

    def _is_held_out(self, key: bytes) -> bool:
        return int.from_bytes(hashlib.sha256(key).digest()[:8], "big") / 2**64 < self.validation_fraction

    def _files(self) -> list[tuple[str, Path]]:
        """The files that `data_files` names, as (path relative to the pattern's fixed part, path), each once."""
        patterns = [self.data_files] if isinstance(self.data_files, str) else self.data_files or []
        if not patterns:
            rule = f"must name the files of data.dataset={self.dataset!r}"
            raise ConfigError("data.data_files", self.data_files, rule, "give a path, a glob such as 'books/**/*.txt'")
        found: dict[Path, str] = {}
        for pattern in patterns:
            matches = _matches(pattern)
            if not matches:
                rule = "names a directory" if os.path.isdir(pattern) else "no file has this path or matches this glob"
                raise ConfigError(
                    "data.data_files", pattern, rule, "give a file's path, or a glob such as 'books/**/*.txt'"
                )
            for relative, path in matches:
                found.setdefault(path, relative)
        return [(relative, path) for path, relative in found.items()]

    def _rows(self, split: Split) -> Iterator[dict[str, Any]]:
        """Streams the rows of a table, local or on the hub; whatever its reader raises becomes a ConfigError."""
        from datasets import load_dataset

        try:
            if self.dataset in FILE_SOURCES:
                files = [str(path) for _, path in self._files()]
                yield from load_dataset(self.dataset, data_files=files, split="train", streaming=True)
            else:
                wanted = self.validation_split if split == "validation" and self.validation_split else self.train_split
                yield from load_dataset(self.dataset, self.name, revision=self.revision, split=wanted, streaming=True)
        except Exception as error:  # pyarrow, json, fsspec, the hub's client: each has errors of its own
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            if self.dataset in FILE_SOURCES:
                remedy = f"check that every file is {self.dataset} and holds rows"
                raise ConfigError(
                    "data.data_files", self.data_files, f"could not be read ({reason})", remedy
                ) from error
            remedy = "check data.dataset, data.name, data.revision, the names of the splits and the network"
            raise ConfigError("data.dataset", self.dataset, f"could not be read ({reason})", remedy) from error

    def _text_of(self, row: dict[str, Any]) -> str | None:
        text = row.get(self.text_column)
        if text is not None and not isinstance(text, str):
            rule = f"must name a column of text, this one holds {type(text).__name__}"
        elif self.text_column not in row:
            rule = "no such column"
        else:
            return text
        raise ConfigError("data.text_column", self.text_column, rule, f"the columns are {', '.join(sorted(row))}")

    def _check_hub_fields(self) -> None:
        if self.dataset in LOCAL_SOURCES:
            for field, default in (
                ("name", None),
                ("revision", None),
                ("train_split", "train"),
                ("validation_split", None),
            ):
                if (value := getattr(self, field)) != default:
                    rule = f"belongs to hub datasets and does nothing where data.dataset is {self.dataset!r}"
                    raise ConfigError(f"data.{field}", value, rule, "leave it out")
            return
        if not _HUB_ID.fullmatch(self.dataset):
            rule = f"must be one of {', '.join(LOCAL_SOURCES)} or a hub id such as 'owner/name'"
            raise ConfigError(
                "data.dataset", self.dataset, rule, "for local files use data.dataset=text and data.data_files"
            )
        if self.max_documents is None:
            rule = f"tokens are held in memory, so a hub dataset (here {self.dataset!r}) needs a limit"
            remedy = f"set it, e.g. 100000, or use one of {', '.join(LOCAL_SOURCES)}"
            raise ConfigError("data.max_documents", None, rule, remedy)
        if self.validation_split == self.train_split:
            rule = "would validate on the documents trained on"
            raise ConfigError(
                "data.validation_split", self.validation_split, rule, "name another split or leave it out"
            )


def _stdlib_files() -> list[tuple[str, Path]]:
    """The sources of Python's standard library without its tests, as (relative path, path) sorted by the former."""
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_CORPUS]
        files += [Path(folder, name) for name in names if _STDLIB_FILE.fullmatch(name)]
    return sorted((path.relative_to(root).as_posix(), path) for path in files)


def _matches(pattern: str) -> list[tuple[str, Path]]:
    """The files a path or glob names, as (path relative to the part before the first wildcard, path), sorted."""
    pattern = os.path.expanduser(pattern)
    if os.path.isfile(pattern):  # also where the name itself holds a bracket
        return [(Path(pattern).name, Path(pattern))]
    parts = Path(pattern).parts
    n_fixed = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    root = Path(*parts[:n_fixed])
    files = [Path(match) for match in glob.glob(pattern, recursive=True) if os.path.isfile(match)]
    return sorted((path.relative_to(root).as_posix(), path) for path in files)
