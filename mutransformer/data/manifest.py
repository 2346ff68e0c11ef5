"""What a cache folder says of itself: the settings its tokens depend on, and its shards. Read by the whole room.

`manifest.json` is written last and makes a cache complete; `progress.json` is the same thing before that, with the
place in the source that the next shard goes on from. The format is specified in docs/data.md.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

from mutransformer.data.storage import Folder
from mutransformer.errors import DataError

FORMAT = 1
MANIFEST, PROGRESS = "manifest.json", "progress.json"

# setting that the tokens depend on -> what the user would change
FIELDS = {
    "format": "the format of the cache",
    "dataset": "data.dataset",
    "name": "data.name",
    "revision": "data.revision",
    "split": "the split of the dataset",
    "files": "the files of data.data_files (names, sizes or times)",
    "text_column": "data.text_column",
    "max_documents": "data.max_documents",
    "holds": "data.validation_fraction, data.test_fraction or the splits",
    "tokenizer": "the content of data.tokenizer",
    "separator": "data.document_separator",
}


@dataclass(frozen=True)
class Shard:
    """One file of tokens, the file of its document starts, and what they hold.

    Args:
        name: path in the cache folder, without `.npy` and `.starts.npy`.
        n_tokens: tokens, separators counted.
        n_documents: documents that start in it.
        n_bytes: UTF-8 bytes of their text.
        largest_id: largest token id.
        file_bytes: size of the two files, tokens first.
        sha256: of the two files' bytes, in hex.
    """

    name: str
    n_tokens: int
    n_documents: int
    n_bytes: int
    largest_id: int
    file_bytes: list[int]
    sha256: list[str]

    @property
    def files(self) -> tuple[str, str]:
        """The file of tokens, and that of document starts."""
        return tokens_file(self.name), starts_file(self.name)


def tokens_file(name: str) -> str:
    """Path of a shard's tokens in the cache folder."""
    return f"{name}.npy"


def starts_file(name: str) -> str:
    """Path of a shard's document starts in the cache folder."""
    return f"{name}.starts.npy"


@dataclass
class Manifest:
    """A cache: settings that its key is made of, shards by split, and where in the source it stands.

    Args:
        settings: what the tokens depend on; the keys are those of FIELDS.
        about: what else a reader wants to know: the settings as they were typed.
        dtype: of the tokens, `uint16` or `uint32`.
        splits: split -> shards in the order of the stream.
        position: what the source goes on from.
        counts: documents read and left out.
    """

    settings: dict[str, Any]
    about: dict[str, Any]
    dtype: str
    splits: dict[str, list[Shard]] = field(default_factory=dict)
    position: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """SHA-256 of the settings, in hex."""
        return key_of(self.settings)

    def total(self, item: str, split: str | None = None) -> int:
        """Sum of an item of the shards (`n_tokens`, `n_documents`, `n_bytes`), of one split or all."""
        shards = [shard for name, shards in self.splits.items() if split in (None, name) for shard in shards]
        return sum(getattr(shard, item) for shard in shards)

    def tokens_sha256(self, split: str) -> str:
        """SHA-256 over the hashes of a split's token files: it stands for the stream of tokens."""
        hashes = "".join(shard.sha256[0] for shard in self.splits[split])
        return hashlib.sha256(hashes.encode()).hexdigest()

    def save(self, folder: Folder, name: str) -> None:
        """Writes it as `manifest.json` or `progress.json`."""
        content = {"key": self.key, **dataclasses.asdict(self)}
        folder.write(name, (json.dumps(content, indent=1) + "\n").encode())

    @classmethod
    def load(cls, folder: Folder, name: str = MANIFEST) -> Manifest | None:
        """Reads it back; None where there is none.

        Raises:
            DataError: when it is damaged, or was edited by hand.
        """
        content = folder.read_json(name)
        if content is None:
            return None
        try:
            key = content.pop("key")
            shards = {split: [Shard(**shard) for shard in shards] for split, shards in content.pop("splits").items()}
            manifest = cls(splits=shards, **content)
            if not shards or not all(isinstance(shard.n_tokens, int) for of in shards.values() for shard in of):
                raise TypeError("splits without shards, or without numbers of tokens")
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{folder}/{name} is damaged ({error!r}); delete the folder {folder}") from error
        if manifest.key != key:
            raise DataError(f"{folder}/{name} is damaged: its key is not that of its settings; delete the folder")
        return manifest


def key_of(settings: dict[str, Any]) -> str:
    """SHA-256 of the settings that tokens depend on, in hex."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def folder_name(settings: dict[str, Any]) -> str:
    """Name of the cache folder for these settings: readable, then twelve digits of the key."""
    words = [settings["dataset"], settings.get("name"), settings.get("split"), key_of(settings)[:12]]
    return "-".join(re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-") for word in words if word)


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings in which two caches differ: what the user would change -> (ours, theirs)."""
    keys = [key for key in FIELDS if ours.get(key) != theirs.get(key)]
    return {FIELDS[key]: (ours.get(key), theirs.get(key)) for key in keys}
