"""The `data` section of a config, as Lightning wants it. Read by the training room and the command line.

It only wires the room: `source.py` finds documents, `tokenizer.py` makes ids, `windows.py` cuts and batches them.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import lightning.pytorch as pl

from mutransformer.data.source import Split, TextSource
from mutransformer.data.tokenizer import Tokenizer, load_tokenizer
from mutransformer.data.windows import InOrderLoader, TokenWindows, WindowLoader
from mutransformer.errors import ConfigError, require_positive

__all__ = ["InOrderLoader", "TextDataModule", "TokenWindows", "WindowLoader"]


class TextDataModule(pl.LightningDataModule):
    """Text as batches of token windows, for training, validation and test (which here is the validation split).

    Args:
        dataset: `stdlib` (the sources of Python's standard library, on every machine), `text` (each file a document),
            `json` (a row a line), `parquet`, or the id of a dataset on the Hugging Face hub.
        name: configuration of a hub dataset.
        revision: branch, tag or commit of a hub dataset.
        data_files: files of `text`, `json` and `parquet`: a path, a glob (`**` for any depth), or a list of them.
        train_split: split of a hub dataset to train on.
        validation_split: split of a hub dataset to validate on; where not given, `validation_fraction` is held out.
        validation_fraction: share of the documents held out for validation, by a hash; between 0 and 1.
        text_column: column that holds the text, in `json`, `parquet` and hub datasets.
        tokenizer: `bytes` (UTF-8 bytes, ByT5's numbering), a hub id, a local folder or the path of a `tokenizer.json`.
        vocab_size: rows of the embedding; where not given, the tokenizer's length. A larger value pads the vocabulary.
        sequence_len: tokens of a window, as inputs and as targets.
        tokens_per_batch: tokens of one optimizer step, over all hosts and micro-batches; a multiple of sequence_len.
        document_separator: token id before, between and after documents; where not given, the tokenizer's eos.
        max_documents: most documents read of a source split, before any are held out; needed for hub datasets.
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
        validation_fraction: float = 0.05,
        text_column: str = "text",
        tokenizer: str = "bytes",
        vocab_size: int | None = None,
        sequence_len: int = 256,
        tokens_per_batch: int = 8192,
        document_separator: int | None = None,
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
            validation_fraction=validation_fraction,
            text_column=text_column,
            max_documents=max_documents,
        )
        self.tokenizer_name = tokenizer
        self.vocab_size = len(self.tokenizer) if vocab_size is None else vocab_size
        self.sequence_len = sequence_len
        self.tokens_per_batch = tokens_per_batch
        self.shuffle_seed = shuffle_seed
        self._document_separator = document_separator
        if document_separator is not None and not 0 <= document_separator < self.vocab_size:
            rule = f"must be a token id, from 0 up and below the vocabulary's {self.vocab_size}"
            raise ConfigError(
                "data.document_separator", document_separator, rule, "leave it out for the tokenizer's eos"
            )
        self._windows: dict[Split, TokenWindows] = {}
        self._train_loader: WindowLoader | None = None
        self._restored: dict[str, Any] | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded when first asked for."""
        return load_tokenizer(self.tokenizer_name)

    @property
    def separator(self) -> int:
        """Token id before, between and after documents; what a sample starts from.

        Raises:
            ConfigError: when none is given and the tokenizer has no eos.
        """
        if self._document_separator is not None:
            return self._document_separator
        if self.tokenizer.eos_id is None:
            rule = f"data.tokenizer={self.tokenizer_name!r} has no eos to put between documents"
            raise ConfigError("data.document_separator", None, rule, f"give a token id below {self.vocab_size}")
        return self.tokenizer.eos_id

    def windows(self, split: Split) -> TokenWindows:
        """Returns the token windows of a split, read and tokenized at the first call.

        Args:
            split: `train` or `validation`.
        Raises:
            ConfigError: when the split is empty, cannot be read, or does not fit vocab_size or sequence_len.
        """
        if split not in self._windows:
            self._windows[split] = TokenWindows.from_documents(
                self.source.documents(split),
                self.tokenizer,
                separator=self.separator,
                vocab_size=self.vocab_size,
                sequence_len=self.sequence_len,
            )
        return self._windows[split]

    def bytes_per_token(self, split: Split = "validation") -> float:
        """Returns the UTF-8 bytes of text that a target token of the split stands for, separators counted as tokens."""
        return self.windows(split).bytes_per_token

    def setup(self, stage: str | None = None) -> None:
        """Reads the splits that `stage` needs, unless they were read before; `fit` starts again at the first epoch."""
        if stage in ("fit", None):
            self._train_loader = self._restored = None
            self.windows("train")
        self.windows("validation")

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
        """Returns a loader of all validation windows."""
        return InOrderLoader(self.windows("validation"), self.tokens_per_batch, **self._ranks())

    def test_dataloader(self) -> InOrderLoader:
        """Returns a loader of all validation windows: there is no third split."""
        return self.val_dataloader()

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
