"""From documents to a cache folder: one pass over a source, tokens into shards, the manifest last. Read by `cache.py`.

A split's stream is separator, document, separator, document, ..., separator. Whenever enough tokens have come
together, each split gets one shard of what it has, and `progress.json` records them with the source's position. All
that is written depends on the source and that position alone, so a pass that was interrupted goes on from the last
whole shard and ends with the same bytes as one that was not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from mutransformer.data.manifest import MANIFEST, PROGRESS, Manifest, Shard, starts_file, tokens_file
from mutransformer.data.reader import Batch, Reader
from mutransformer.data.storage import Folder, Lock
from mutransformer.data.tokenizer import Tokenizer
from mutransformer.errors import ConfigError, DataError, Interrupted, SaveError

SHARD_TOKENS = 2**25  # tokens of all splits together between two shards; up to twice their bytes are held in memory

Report = Callable[[int, int, float | None], None]  # documents, tokens, share of the source read


class LostLock(Exception):
    """Another process has taken the lock over."""


class CacheWriter:
    """Writes one cache, from wherever an earlier writer left it.

    Args:
        folder: of the cache.
        reader: of the source.
        tokenizer: makes the ids.
        manifest: settings of the cache; shards are added to it.
        vocab_size: every id must be below it.
        lock: held by this process.
    """

    def __init__(
        self,
        folder: Folder,
        reader: Reader,
        tokenizer: Tokenizer,
        manifest: Manifest,
        *,
        vocab_size: int,
        lock: Lock,
    ) -> None:
        self._folder, self._reader, self._tokenizer, self._lock = folder, reader, tokenizer, lock
        self._vocab_size = vocab_size
        self._id_limit = min(vocab_size, len(tokenizer))
        folder.sweep()
        earlier = Manifest.load(folder, PROGRESS)
        if earlier is not None and earlier.settings != manifest.settings:
            raise DataError(f"{folder} holds tokens made under other settings; delete it")
        self.manifest = manifest if earlier is None else earlier
        for split in reader.reading.splits:
            self.manifest.splits.setdefault(split, [])
        self._separator = np.array([manifest.settings["separator"]], manifest.dtype)
        self._pending = {split: _Pending() for split in reader.reading.splits}

    def write(self, report: Report) -> Manifest:
        """Writes all that is missing; returns the complete manifest.

        Args:
            report: called after each batch.
        Raises:
            ConfigError: when the source, the tokenizer or a setting cannot work.
            DataError, SaveError, Interrupted: when it stopped half-way; the message says that the same command goes on.
        """
        try:
            self._write(report)
        except Interrupted as error:
            raise Interrupted(error.signum, f"stopped; {self._kept()}") from None
        except SaveError as error:
            raise SaveError(f"{error}; {self._kept()}") from error
        return self.manifest

    def _write(self, report: Report) -> None:
        manifest, counts = self.manifest, self.manifest.counts
        for batch in self._reader.batches(manifest.position):
            self._append(batch)
            counts["n_read"] = batch.n_read
            counts["n_empty"] = counts.get("n_empty", 0) + batch.n_empty
            n_pending = sum(pending.n_tokens for pending in self._pending.values())
            report(batch.n_read, manifest.total("n_tokens") + n_pending, batch.done)
            if n_pending >= SHARD_TOKENS:
                self._flush(batch.position, PROGRESS)
        self._check_not_empty()
        self._check_unchanged()
        for pending in self._pending.values():
            pending.add(self._separator)
        self._flush({"n_read": counts.get("n_read", 0)}, MANIFEST)
        self._folder.delete(PROGRESS)

    def _append(self, batch: Batch) -> None:
        encoded = self._tokenizer.encode_batch([text for _, _, text in batch.documents])
        for (number, split, text), ids in zip(batch.documents, encoded, strict=True):
            if ids.size and (largest := int(ids.max())) >= self._id_limit:
                raise self._outside(number, largest)
            pending = self._pending[split]
            pending.starts.append(pending.n_tokens)
            pending.n_bytes += len(text)
            pending.add(self._separator)
            pending.add(ids.astype(self._separator.dtype, copy=False))

    def _outside(self, number: int, largest: int) -> ConfigError:
        """The error for a document with an id that has no place in the vocabulary."""
        if largest >= len(self._tokenizer):
            rule = f"has {len(self._tokenizer)} ids, and makes id {largest} of document {number}"
            return ConfigError("data.tokenizer", self.manifest.about["tokenizer"], rule, "mend its files")
        rule = f"must be above every token id, and document {number} has {largest}"
        return ConfigError("data.vocab_size", self._vocab_size, rule, f"use at least {len(self._tokenizer)}")

    def _flush(self, position: dict[str, Any], name: str) -> None:
        """Writes a shard of every split that has tokens, then says so in the file `name`."""
        if not self._lock.is_ours():
            raise LostLock
        shards = {split: self._write_shard(split) for split, pending in self._pending.items() if pending.pieces}
        for split, shard in shards.items():
            self.manifest.splits[split].append(shard)
            self._pending[split] = _Pending()
        self.manifest.position = position
        self.manifest.save(self._folder, name)

    def _write_shard(self, split: str) -> Shard:
        pending, name = self._pending[split], f"{split}/{len(self.manifest.splits[split]):06d}"
        tokens, starts = np.concatenate(pending.pieces), np.array(pending.starts, np.int64)
        contents = (
            self._folder.write_array(tokens_file(name), tokens),
            self._folder.write_array(starts_file(name), starts),
        )
        return Shard(
            name=name,
            n_tokens=len(tokens),
            n_documents=len(starts),
            n_bytes=pending.n_bytes,
            largest_id=int(tokens.max()),
            file_bytes=[len(content) for content in contents],
            sha256=[hashlib.sha256(content).hexdigest() for content in contents],
        )

    def _check_not_empty(self) -> None:
        counts, source = self.manifest.counts, self._reader.source
        for split, pending in self._pending.items():
            if pending.starts or self.manifest.total("n_documents", split):
                continue
            n_read = counts.get("n_read", 0)
            if n_read == counts.get("n_empty", 0) or (split == self._reader.reading.rest and len(self._pending) == 1):
                rule = f"holds no document to {'train' if split == 'train' else split} on"
                raise ConfigError("data.dataset", source.dataset, rule, "check that it holds text")
            field = f"data.{'validation' if split == 'train' else split}_fraction"
            rule = f"leaves no document in the {split} split, of {n_read} read from data.dataset={source.dataset!r}"
            remedy = "give more documents (a text file counts as one) or another fraction"
            raise ConfigError(field, getattr(source, field.removeprefix("data.")), rule, remedy)

    def _check_unchanged(self) -> None:
        settings = self.manifest.settings
        if {**settings, **self._reader.state_of_source()} != settings:
            raise DataError(f"the files of data.data_files changed while they were read; delete {self._folder}")

    def _kept(self) -> str:
        n_shards = sum(map(len, self.manifest.splits.values()))
        return (
            f"{n_shards} shards with {self.manifest.total('n_tokens'):,} tokens are kept in {self._folder}\n"
            "the same command goes on from there"
        )


class _Pending:
    """Tokens of a split that are in no shard yet."""

    def __init__(self) -> None:
        self.pieces: list[np.ndarray] = []
        self.starts: list[int] = []
        self.n_tokens = 0
        self.n_bytes = 0

    def add(self, ids: np.ndarray) -> None:
        self.pieces.append(ids)
        self.n_tokens += len(ids)
