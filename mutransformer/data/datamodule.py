"""The `data` section of a config, as Lightning wants it. Read by the training room and the command line.

It only wires the room: `source.py` says what to read, `cache.py` has its tokens made once, `windows.py` cuts and
batches them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import lightning.pytorch as pl

from mutransformer.data.cache import CacheRequest, bring_here, open_shards
from mutransformer.data.manifest import Manifest
from mutransformer.data.progress import WritingProgress
from mutransformer.data.source import Split, TextSource
from mutransformer.data.storage import Folder, default_cache
from mutransformer.data.tokenizer import Tokenizer, load_tokenizer
from mutransformer.data.windows import InOrderLoader, TokenStream, TokenWindows, WindowLoader
from mutransformer.errors import ConfigError, require_positive

__all__ = ["InOrderLoader", "TextDataModule", "TokenWindows", "WindowLoader"]


class TextDataModule(pl.LightningDataModule):
    """Text as batches of token windows, for training, validation and test.

    Args:
        dataset: `stdlib` (the sources of Python's standard library, on every machine), `text` (each file a document),
            `json` (a row a line), `parquet`, or the id of a dataset on the Hugging Face hub.
        name: configuration of a hub dataset.
        revision: branch, tag or commit of a hub dataset; only a commit means the same data for ever.
        data_files: files of `text`, `json` and `parquet`: a path, a glob (`**` for any depth), or a list of them.
        train_split: split of a hub dataset to train on.
        validation_split: split of a hub dataset to validate on; where not given, `validation_fraction` is held out.
        test_split: split of a hub dataset for `mutransformer test`; where not given, `test_fraction` is held out.
        validation_fraction: share of the documents held out for validation, by a hash; between 0 and 1.
        test_fraction: share of the documents held out for `mutransformer test`, by a hash; 0: test on the validation
            split.
        text_column: column that holds the text, in `json`, `parquet` and hub datasets.
        tokenizer: `bytes` (UTF-8 bytes, ByT5's numbering), a hub id, a local folder or the path of a `tokenizer.json`.
        vocab_size: rows of the embedding; where not given, the tokenizer's length. A larger value pads the vocabulary.
        cache: folder of token caches, local or `gs://...`; null: `$MUTRANSFORMER_CACHE`, else `mutransformer` in
            the user's cache folder. A remote cache is copied there before it is read.
        sequence_len: tokens of a window, as inputs and as targets.
        tokens_per_batch: tokens of one optimizer step, over all hosts and micro-batches; a multiple of sequence_len.
        document_separator: token id before, between and after documents; where not given, the tokenizer's eos, or its
            bos where it has no eos.
        attend_across_documents: `true`: a window is read as one text; `false`: attention stays within a document, and
            positions start again in each.
        max_documents: most documents read of a source split, before any are held out; null: all.
        shuffle_seed: seed of the order of training windows; from 0 up.
    Raises:
        ConfigError: when a value cannot work; nothing is read to find out but the tokenizer, where its size is needed.
    """

    def __init__(
        self,
        *,
        dataset: str = "stdlib",
        name: str | None = None,
        revision: str | None = None,
        data_files: str | list[str] | None = None,
        train_split: str = "train",
        validation_split: str | None = None,
        test_split: str | None = None,
        validation_fraction: float = 0.05,
        test_fraction: float = 0.0,
        text_column: str = "text",
        tokenizer: str = "bytes",
        vocab_size: int | None = None,
        cache: str | None = None,
        sequence_len: int = 256,
        tokens_per_batch: int = 8192,
        document_separator: int | None = None,
        attend_across_documents: bool = True,
        max_documents: int | None = None,
        shuffle_seed: int = 0,
    ) -> None:
        super().__init__()
        require_positive("data", sequence_len=sequence_len, tokens_per_batch=tokens_per_batch, vocab_size=vocab_size)
        if tokens_per_batch % sequence_len:
            lower = tokens_per_batch // sequence_len * sequence_len
            rule = f"must be a multiple of sequence_len={sequence_len}"
            remedy = " or ".join(str(value) for value in (lower, lower + sequence_len) if value)
            raise ConfigError("data.tokens_per_batch", tokens_per_batch, rule, f"use {remedy}")
        if shuffle_seed < 0:
            raise ConfigError("data.shuffle_seed", shuffle_seed, "must not be negative", "use 0")
        self.source = TextSource(
            dataset=dataset,
            name=name,
            revision=revision,
            data_files=data_files,
            train_split=train_split,
            validation_split=validation_split,
            test_split=test_split,
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
            text_column=text_column,
            max_documents=max_documents,
        )
        self.cache = Folder(default_cache() if cache is None else cache)
        self.tokenizer_name = tokenizer
        self.vocab_size = len(self.tokenizer) if vocab_size is None else vocab_size
        self.sequence_len = sequence_len
        self.tokens_per_batch = tokens_per_batch
        self.attend_across_documents = attend_across_documents
        self.shuffle_seed = shuffle_seed
        self._document_separator = document_separator
        if document_separator is not None and not 0 <= document_separator < self.vocab_size:
            rule = f"must be a token id, from 0 up and below the vocabulary's {self.vocab_size}"
            raise ConfigError(
                "data.document_separator", document_separator, rule, "leave it out for the tokenizer's eos"
            )
        self._caches: dict[str, tuple[Folder, Manifest]] = {}
        self._windows: dict[str, TokenWindows] = {}
        self._train_loader: WindowLoader | None = None
        self._restored: dict[str, Any] | None = None
        self.evaluation_windows: int | None = None  # how many windows validation and test read; None: all

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded when first asked for."""
        return load_tokenizer(self.tokenizer_name)

    @property
    def separator(self) -> int:
        """Token id before, between and after documents; what a sample starts from.

        Raises:
            ConfigError: when none is given and the tokenizer has neither eos nor bos.
        """
        if self._document_separator is not None:
            return self._document_separator
        if self.tokenizer.separator_id is None:
            rule = f"data.tokenizer={self.tokenizer_name!r} has neither eos nor bos to put between documents"
            raise ConfigError("data.document_separator", None, rule, f"give a token id below {self.vocab_size}")
        return self.tokenizer.separator_id

    @property
    def has_test_split(self) -> bool:
        """Whether `test` measures on documents of its own; else on those of validation."""
        return self.source.test_split is not None or self.source.test_fraction > 0

    def requests(self) -> list[CacheRequest]:
        """Returns the caches that this configuration needs, that of the training split first."""
        return [
            CacheRequest(
                root=self.cache,
                reading=reading,
                tokenizer=self.tokenizer,
                tokenizer_name=self.tokenizer_name,
                separator=self.separator,
                vocab_size=self.vocab_size,
            )
            for reading in self.source.readings()
        ]

    def prepare(self, split: Split | None = None) -> list[tuple[Folder, Manifest]]:
        """Makes the caches that are not there yet, of one split or all; one process does, others wait.

        Args:
            split: `train`, `validation` or `test`; None: all.
        Returns:
            Folder and manifest of each.
        Raises:
            ConfigError: when the source cannot be read, a split is empty, or an id does not fit vocab_size.
            DataError: when reading stopped half-way; the same command goes on.
        """
        wanted = [request for request in self.requests() if split is None or split in request.reading.splits]
        for request in wanted:
            splits = request.reading.splits
            if not set(splits) <= self._caches.keys():
                progress = WritingProgress(f"{self.source.dataset} ({', '.join(splits)})")
                try:
                    self._caches.update(dict.fromkeys(splits, request.ensure(progress)))
                finally:
                    progress.close()
        return [self._caches[request.reading.rest] for request in wanted]

    def windows(self, split: Split) -> TokenWindows:
        """Returns the token windows of a split; its cache is made at the first call where there is none.

        Args:
            split: `train`, `validation` or `test`.
        Raises:
            ConfigError: when the split is empty, cannot be read, or does not fit vocab_size or sequence_len.
            DataError: when the cache is damaged, or reading stopped half-way.
        """
        split = "validation" if split == "test" and not self.has_test_split else split
        if split not in self._windows:
            ((folder, manifest),) = self.prepare(split)
            largest = max(shard.largest_id for shard in manifest.splits[split])
            if largest >= self.vocab_size:
                rule = f"must be above every token id, and the {split} split has {largest}"
                raise ConfigError("data.vocab_size", self.vocab_size, rule, f"use at least {largest + 1}")
            shards, starts = open_shards(bring_here(folder, manifest), manifest, split)
            n_bytes, sha256 = manifest.total("n_bytes", split), manifest.tokens_sha256(split)
            stream = TokenStream(shards, starts, n_bytes=n_bytes, sha256=sha256)
            self._windows[split] = TokenWindows(
                stream, self.sequence_len, attend_across_documents=self.attend_across_documents
            )
        return self._windows[split]

    def bytes_per_token(self, split: Split = "validation") -> float:
        """Returns the UTF-8 bytes of text that a target token of the split stands for, separators counted as tokens."""
        return self.windows(split).bytes_per_token

    def setup(self, stage: str | None = None) -> None:
        """Opens the splits that `stage` needs, unless they are open; `fit` starts again at the first epoch."""
        if stage in ("fit", None):
            self._train_loader = self._restored = None
            self.windows("train")
        self.windows("test" if stage == "test" else "validation")

    def epoch_summary(self) -> str:
        """Returns what an epoch of training reads, and what it leaves out, in a line."""
        loader, windows = self.train_dataloader(), self.windows("train")
        return (
            f"an epoch: {len(loader):,} batches of {loader.rows_per_batch:,} windows; left out: "
            f"{loader.n_leftover_windows:,} of {windows.n_windows:,} windows (others each epoch) and the last "
            f"{windows.n_leftover_tokens:,} of {len(windows.stream):,} tokens"
        )

    def train_dataloader(self) -> WindowLoader:
        """Returns the loader of the fit under way: the same one each time, as it knows how far it is."""
        if n_overfit := getattr(self.trainer, "overfit_batches", 0):
            rule = "the loader goes on to new windows in each epoch, so it would overfit none"
            raise ConfigError(
                "trainer.overfit_batches", n_overfit, rule, "use few documents (data.max_documents) instead"
            )
        if self._train_loader is None:
            self._train_loader = WindowLoader(
                self.windows("train"), self.tokens_per_batch, shuffle=True, seed=self.shuffle_seed, **self._ranks()
            )
            if self._restored is not None:
                self._train_loader.load_state_dict(self._restored)
        return self._train_loader

    def val_dataloader(self) -> InOrderLoader:
        """Returns a loader of all validation windows, or the first `evaluation_windows` of them."""
        return self._in_order("validation")

    def test_dataloader(self) -> InOrderLoader:
        """Returns a loader of all test windows; those of validation where there is no test split."""
        return self._in_order("test")

    def _in_order(self, split: Split) -> InOrderLoader:
        limit = self.evaluation_windows
        return InOrderLoader(self.windows(split), self.tokens_per_batch, limit=limit, **self._ranks())

    def state_dict(self) -> dict[str, Any]:
        """Returns the training loader's position, for the checkpoint.

        Lightning saves it from the loader too, but does not load it where a run that counts epochs resumes at an
        epoch's end: it would train on the first epoch's order again.
        """
        return {} if self._train_loader is None else {"train_loader": self._train_loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the position until the training loader is made (`trainer.validate` makes none, and checks nothing)."""
        self._restored = state_dict.get("train_loader")

    def _ranks(self) -> dict[str, int]:
        if self.trainer is None:
            return {"rank": 0, "world_size": 1}
        return {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
