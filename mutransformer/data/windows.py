"""The token stream, cut into windows when read, and the two loaders that batch them. Read by `datamodule.py`.

Shape letters: B rows of a batch on this rank, L sequence length.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mutransformer.data.order import window_order
from mutransformer.data.tokenizer import Tokenizer, as_bytes
from mutransformer.errors import ConfigError


class TokenWindows:
    """A stream of tokens, and its windows: number i holds tokens i*L to i*L + L, the last being the next one's first.

    So each token but the stream's first is a target exactly once, up to the at most L - 1 after the last window.

    Args:
        tokens: [n_tokens] uint16 or uint32, separator, document, separator, document, ..., separator.
        n_bytes: UTF-8 bytes of the documents, separators not counted.
        sequence_len: L, targets of a window; at least 1.
    Raises:
        ConfigError: when the stream is shorter than one window.
    """

    def __init__(self, tokens: np.ndarray, n_bytes: int, sequence_len: int) -> None:
        if len(tokens) < sequence_len + 1:
            rule = f"a window takes one token more than that, and a split holds {len(tokens)} tokens"
            raise ConfigError(
                "data.sequence_len", sequence_len, rule, f"use at most {len(tokens) - 1}, or more documents"
            )
        self.tokens = tokens
        self.n_bytes = n_bytes
        self.sequence_len = sequence_len
        self._windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence_len + 1)[::sequence_len]
        self.n_windows = len(self._windows)

    @classmethod
    def from_documents(
        cls,
        documents: Iterable[bytes | str],
        tokenizer: Tokenizer,
        *,
        separator: int,
        vocab_size: int,
        sequence_len: int,
    ) -> TokenWindows:
        """Tokenizes `documents` into one stream, with a separator before the first and after each.

        Args:
            documents: the texts.
            tokenizer: makes their ids.
            separator: the token id before, between and after documents.
            vocab_size: every id must be below it, the separator too; above 65,536 the stream is uint32, else uint16.
            sequence_len: L, see the class.
        Returns:
            The windows of the stream.
        Raises:
            ConfigError: when an id is not below vocab_size, or the stream is shorter than one window.
        """
        dtype = np.uint16 if vocab_size <= 2**16 else np.uint32
        n_bytes = 0

        def counted() -> Iterator[bytes]:
            nonlocal n_bytes
            for document in map(as_bytes, documents):
                n_bytes += len(document)
                yield document

        def narrowed(ids: np.ndarray) -> np.ndarray:
            if ids.size and (largest := int(ids.max())) >= vocab_size:
                rule = f"must be above every token id, and there is {largest}"
                remedy = f"use at least {max(largest + 1, len(tokenizer))}"
                raise ConfigError("data.vocab_size", vocab_size, rule, remedy)
            return ids.astype(dtype, copy=False)

        separator_ids = narrowed(np.array([separator]))
        pieces = [separator_ids]
        for ids in tokenizer.encode_documents(counted()):
            pieces += (narrowed(ids), separator_ids)
        return cls(np.concatenate(pieces), n_bytes, sequence_len)

    def __getitem__(self, indices: np.ndarray) -> Tensor:
        """Returns the windows of these numbers.

        Shapes:
            [n] int -> [n, L + 1] int64
        """
        return torch.from_numpy(self._windows[indices].astype(np.int64))

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text that a target token stands for, separators counted as tokens."""
        return self.n_bytes / (len(self.tokens) - 1)

    @cached_property
    def tokens_sha256(self) -> str:
        """SHA-256 of the stream, in hex; the same on any machine."""
        little_endian = self.tokens.astype(self.tokens.dtype.newbyteorder("<"), copy=False)
        return hashlib.sha256(little_endian.data).hexdigest()


class WindowLoader:
    """Batches for training: whole ones only, each epoch in its own order, resumable at any batch.

    The loader stands at a position (epoch, batch), that of the batch it yields next. Iterating goes on from there to
    the epoch's end, whoever else iterated before; so a second `iter()` loses nothing, and after the last batch the
    position is (epoch + 1, 0). Batch b of an epoch is the same global batch at any number of ranks, each of which
    takes its share of the rows.

    Args:
        windows: what to read.
        tokens_per_batch: tokens of a global batch; a multiple of sequence_len * world_size.
        shuffle: whether each epoch is a permutation of its own; else windows come in the stream's order.
        seed: seed of the permutations; from 0 up.
        rank: number of this process among `world_size`.
        world_size: how many processes share a global batch.
    Raises:
        ConfigError: when the rows of a batch cannot be shared evenly, or there are fewer windows than one batch takes.
    """

    def __init__(
        self,
        windows: TokenWindows,
        tokens_per_batch: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.windows = windows
        self.rows_per_batch = _rows_per_batch(windows, tokens_per_batch, world_size)
        self._shuffle, self._seed, self._rank, self._world_size = shuffle, seed, rank, world_size
        self._epoch = self._batch = 0
        if len(self) == 0:
            largest = windows.n_windows // world_size * world_size * windows.sequence_len
            rule = (
                f"the training split holds {windows.n_windows} windows of {windows.sequence_len} tokens, not one batch"
            )
            remedy = (
                f"use at most {largest}" if largest else f"give more documents: {world_size} ranks need a window each"
            )
            raise ConfigError("data.tokens_per_batch", tokens_per_batch, rule, remedy)

    def __len__(self) -> int:
        """Whole batches in an epoch. Lightning resumes a loader exactly only where it has a length."""
        return self.windows.n_windows // self.rows_per_batch

    @property
    def n_leftover_windows(self) -> int:
        """Windows that an epoch leaves out, because they do not fill a batch; others in each epoch if shuffled."""
        return self.windows.n_windows % self.rows_per_batch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yields `{"tokens": [B, L + 1] int64}` from the position to the end of its epoch."""
        epoch = self._epoch
        n_windows = self.windows.n_windows
        order = window_order(n_windows, epoch, self._seed) if self._shuffle else np.arange(n_windows)
        while self._epoch == epoch:
            start = self._batch * self.rows_per_batch
            rows = order[start : start + self.rows_per_batch]
            self._batch += 1
            if self._batch == len(self):
                self._epoch, self._batch = epoch + 1, 0
            yield {"tokens": self.windows[_share(rows, self._rank, self._world_size)]}

    def state_dict(self) -> dict[str, int | str]:
        """Returns the position of the next batch, and what must be the same for it to mean the same batch."""
        return {"epoch": self._epoch, "batch": self._batch, **self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves to the position in `state`, which `state_dict` returned in this run or an earlier one.

        Raises:
            ConfigError: when the position belongs to other data, batches or order; names the first that differs.
        """
        for item, ours in self._fingerprint().items():
            if (theirs := state.get(item)) != ours:
                field = _FIELD_OF.get(item, "data.dataset")
                rule = f"the checkpoint's place in the data is for {item}={theirs!r}, this run has {item}={ours!r}"
                remedy = "set the data options as they were, or start anew without the checkpoint"
                raise ConfigError(field, ours, rule, remedy)
        self._epoch, self._batch = state["epoch"], state["batch"]

    def _fingerprint(self) -> dict[str, int | str]:
        return {
            "sequence_len": self.windows.sequence_len,
            "rows_per_batch": self.rows_per_batch,
            "shuffle": int(self._shuffle),
            "shuffle_seed": self._seed,
            "tokens_sha256": self.windows.tokens_sha256,
            "n_windows": self.windows.n_windows,
        }


_FIELD_OF = {
    "sequence_len": "data.sequence_len",
    "rows_per_batch": "data.tokens_per_batch",
    "shuffle_seed": "data.shuffle_seed",
}


class InOrderLoader:
    """Batches for validation: each `iter()` reads all windows in order from the first; the last batch is smaller.

    Args:
        windows: what to read.
        tokens_per_batch: tokens of a global batch; a multiple of sequence_len * world_size.
        rank: number of this process among `world_size`.
        world_size: how many processes share a global batch. Each gets equally many rows of every batch, so up to
            world_size - 1 windows are left out at the end.
    Raises:
        ConfigError: when the rows of a batch cannot be shared evenly, or there are fewer windows than ranks.
    """

    def __init__(self, windows: TokenWindows, tokens_per_batch: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.windows = windows
        self.rows_per_batch = _rows_per_batch(windows, tokens_per_batch, world_size)
        self.n_leftover_windows = windows.n_windows % world_size
        self._n_used = windows.n_windows - self.n_leftover_windows
        self._rank, self._world_size = rank, world_size
        if self._n_used == 0:
            rule = f"the validation split holds {windows.n_windows} windows, and {world_size} ranks need one each"
            raise ConfigError("data.sequence_len", windows.sequence_len, rule, "use a smaller value or more documents")

    def __len__(self) -> int:
        return -(-self._n_used // self.rows_per_batch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yields `{"tokens": [B, L + 1] int64}`."""
        for start in range(0, self._n_used, self.rows_per_batch):
            rows = np.arange(start, min(start + self.rows_per_batch, self._n_used))
            yield {"tokens": self.windows[_share(rows, self._rank, self._world_size)]}


def _rows_per_batch(windows: TokenWindows, tokens_per_batch: int, world_size: int) -> int:
    """Rows of a global batch."""
    unit = windows.sequence_len * world_size
    if tokens_per_batch < unit or tokens_per_batch % unit:
        rule = f"must be a multiple of sequence_len * ranks = {windows.sequence_len} * {world_size}"
        raise ConfigError(
            "data.tokens_per_batch", tokens_per_batch, rule, f"use {max(1, tokens_per_batch // unit) * unit}"
        )
    return tokens_per_batch // windows.sequence_len


def _share(rows: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """The rank's contiguous part of the rows of a global batch."""
    n_local = len(rows) // world_size
    return rows[rank * n_local : (rank + 1) * n_local]
