"""The token stream, cut into windows when read, and the two loaders that batch them. Read by `datamodule.py`.

Shape letters: B rows of a batch on this rank, L sequence length.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mutransformer.data.order import window_at
from mutransformer.errors import ConfigError

_Read = tuple[dict[str, Tensor], bool]  # batch, whether it came from the disk and not from memory
_PLACES_PER_BLOCK = 2**14  # of the order, computed at once: a millisecond, as numpy is slow on few numbers


class TokenStream:
    """A split's tokens, in one or more shards that are mapped from files: separator, document, separator, ...

    Args:
        shards: [n] uint16 or uint32 each; a document may not lie across two.
        starts: [n] int64 each, where in the shard the documents start, each with the separator before it.
        n_bytes: UTF-8 bytes of the documents, separators not counted.
        sha256: stands for all tokens.
    """

    def __init__(
        self, shards: Sequence[np.ndarray], starts: Sequence[np.ndarray], *, n_bytes: int, sha256: str
    ) -> None:
        self.shards = [np.asarray(shard) for shard in shards]  # a memmap's own indexing is slow
        self.starts = starts
        self.n_bytes = n_bytes
        self.sha256 = sha256
        self._ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)
        self._begins = self._ends - [len(shard) for shard in shards]
        self._view = np.empty((0, 0))  # all runs of tokens of a length, where there is one shard: one gather reads many

    def __len__(self) -> int:
        """Tokens, separators counted."""
        return int(self._ends[-1])

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns `length` tokens from each start on; they may lie in several shards.

        Shapes:
            [n] int -> [n, length] in the shards' dtype
        """
        if len(self.shards) == 1:
            if self._view.shape[1] != length:
                self._view = np.lib.stride_tricks.sliding_window_view(self.shards[0], length)
            return self._view[starts]
        numbers = self._ends.searchsorted(starts, "right")
        offsets = starts - self._begins[numbers]
        pieces = []
        for number, offset in zip(numbers.tolist(), offsets.tolist(), strict=True):
            piece = self.shards[number][offset : offset + length]
            pieces.append(piece)
            n_missing = length - len(piece)
            while n_missing:
                number += 1
                piece = self.shards[number][:n_missing]
                pieces.append(piece)
                n_missing -= len(piece)
        return np.concatenate(pieces).reshape(-1, length)

    @property
    def n_documents(self) -> int:
        """Documents in all."""
        return sum(map(len, self.starts))

    def heads(self, n: int, length: int) -> list[list[int]]:
        """Returns the beginnings of `n` documents, spread evenly: each its separator and up to `length` tokens.

        Args:
            n: from 1 up to `n_documents`.
            length: from 0 up.
        """
        starts = np.concatenate([begin + starts for begin, starts in zip(self._begins, self.starts, strict=True)])
        ends = np.append(starts[1:], len(self) - 1)  # a separator closes the stream
        chosen = np.arange(n) * len(starts) // n
        pairs = zip(starts[chosen].tolist(), np.minimum(starts + 1 + length, ends)[chosen].tolist(), strict=True)
        return [self.read(np.array([start]), stop - start)[0].tolist() for start, stop in pairs]

    def starts_within(self, start: int, stop: int) -> np.ndarray:
        """Where documents start among the tokens from `start` to `stop`, counted from `start`."""
        first, last = (int(self._ends.searchsorted(place, "right")) for place in (start, stop - 1))
        found = []
        for number in range(first, last + 1):
            offset = int(self._begins[number]) - start
            starts = self.starts[number]
            low, high = np.searchsorted(starts, (-offset, stop - start - offset))
            found.append(starts[low:high] + offset)
        return np.concatenate(found)


class TokenWindows:
    """The windows of a stream: number i holds tokens i*L to i*L + L, the last being the next one's first.

    So each token but the stream's first is a target exactly once, up to the at most L - 1 after the last window.

    Args:
        stream: the tokens.
        sequence_len: L, targets of a window; at least 1.
        attend_across_documents: whether a window is read as one text; else each batch says where documents start.
    Raises:
        ConfigError: when the stream is shorter than one window.
    """

    def __init__(self, stream: TokenStream, sequence_len: int, *, attend_across_documents: bool = True) -> None:
        if len(stream) < sequence_len + 1:
            rule = f"a window takes one token more than that, and a split holds {len(stream)} tokens"
            raise ConfigError(
                "data.sequence_len", sequence_len, rule, f"use at most {len(stream) - 1}, or more documents"
            )
        self.stream = stream
        self.sequence_len = sequence_len
        self.attend_across_documents = attend_across_documents
        self.n_windows = (len(stream) - 1) // sequence_len

    @property
    def n_leftover_tokens(self) -> int:
        """Tokens after the last window; in no epoch are they a target."""
        return len(self.stream) - 1 - self.n_windows * self.sequence_len

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text that a target token stands for, separators counted as tokens."""
        return self.stream.n_bytes / (len(self.stream) - 1)

    def batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Returns the windows of these numbers, from 0 up, as a batch.

        Returns:
            `tokens`; and `positions`, each counted from the start of its document or of the window, whichever is
            later, unless a window is read as one text.
        Shapes:
            [B] int -> tokens [B, L + 1] int64, positions [B, L] int64
        """
        tokens = self.stream.read(indices * self.sequence_len, self.sequence_len + 1)
        batch = {"tokens": torch.from_numpy(tokens.astype(np.int64))}
        if not self.attend_across_documents:
            batch["positions"] = torch.from_numpy(self._positions(indices))
        return batch

    def _positions(self, indices: np.ndarray) -> np.ndarray:
        starts = np.zeros((len(indices), self.sequence_len), np.int64)
        for row, index in zip(starts, indices.tolist(), strict=True):
            first = index * self.sequence_len
            within = self.stream.starts_within(first, first + self.sequence_len)
            row[within] = within
        return np.arange(self.sequence_len) - np.maximum.accumulate(starts, axis=1)


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
    Attributes:
        wait_s: seconds in which whoever iterates has waited for a batch, over all epochs.
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
        self._shuffle, self._seed = shuffle, seed
        self._share = _share(0, self.rows_per_batch, rank, world_size)
        self._batches_per_block = max(1, _PLACES_PER_BLOCK // len(self._share))
        self._epoch = self._batch = 0
        self.wait_s = 0.0
        self._block: tuple[tuple[int, int], np.ndarray] = (-1, -1), np.empty(0)
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
        """Yields batches, see `TokenWindows.batch`, from the position to the end of its epoch.

        After a batch that had to wait for the disk, the next is read by a thread meanwhile; else that would cost more
        than it gives.
        """
        epoch = self._epoch
        ahead: tuple[int, Future[_Read]] | None = None
        with ThreadPoolExecutor(1) as pool:
            while self._epoch == epoch:
                began, number = time.perf_counter(), self._batch
                is_there = ahead is not None and ahead[0] == number  # not where another iterator went on
                batch, is_from_disk = ahead[1].result() if ahead and is_there else self._read(epoch, number)
                self._batch += 1
                if self._batch == len(self):
                    self._epoch, self._batch = epoch + 1, 0
                elif is_from_disk:
                    ahead = self._batch, pool.submit(self._read, epoch, self._batch)
                self.wait_s += time.perf_counter() - began
                yield batch

    def _read(self, epoch: int, number: int) -> _Read:
        indices, n_faults = self._indices(epoch, number), _disk_reads()
        return self.windows.batch(indices), _disk_reads() > n_faults

    def _indices(self, epoch: int, batch: int) -> np.ndarray:
        """The windows of this rank's rows; those of many batches are computed at once and kept."""
        n_batches = self._batches_per_block
        block = batch // n_batches
        if self._block[0] != (epoch, block):
            batches = np.arange(block * n_batches, min((block + 1) * n_batches, len(self)))
            places = batches[:, None] * self.rows_per_batch + self._share
            if self._shuffle:
                order = window_at(places.ravel(), self.windows.n_windows, epoch=epoch, seed=self._seed)
                places = order.reshape(places.shape)
            self._block = (epoch, block), places
        return self._block[1][batch % n_batches]

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
            "order": "feistel",
            "tokens_sha256": self.windows.stream.sha256,
            "n_windows": self.windows.n_windows,
        }


_FIELD_OF = {
    "sequence_len": "data.sequence_len",
    "rows_per_batch": "data.tokens_per_batch",
    "shuffle_seed": "data.shuffle_seed",
}


def _disk_reads() -> int:
    """Pages of mapped files that this process had to wait for so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


class InOrderLoader:
    """Batches for evaluation: each `iter()` reads all windows in order from the first; the last batch is smaller.

    Every window counts once at any number of ranks: where they do not get equally many of the last batch, some have a
    row more that a `mask` [B, L], false there, takes out.

    Args:
        windows: what to read.
        tokens_per_batch: tokens of a global batch; a multiple of sequence_len * world_size.
        limit: read the first so many windows alone; None: all.
        rank: number of this process among `world_size`.
        world_size: how many processes share a global batch, each with equally many rows of it.
    Raises:
        ConfigError: when the rows of a batch cannot be shared evenly.
    """

    def __init__(
        self,
        windows: TokenWindows,
        tokens_per_batch: int,
        *,
        limit: int | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.windows = windows
        self.rows_per_batch = _rows_per_batch(windows, tokens_per_batch, world_size)
        self.n_windows = windows.n_windows if limit is None else min(limit, windows.n_windows)
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        return -(-self.n_windows // self.rows_per_batch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yields batches, see `TokenWindows.batch`."""
        for start in range(0, self.n_windows, self.rows_per_batch):
            n_rows = min(self.rows_per_batch, self.n_windows - start)
            n_filled = -(-n_rows // self._world_size) * self._world_size
            share = _share(start, n_filled, self._rank, self._world_size)
            batch = self.windows.batch(np.minimum(share, self.n_windows - 1))
            if n_filled > n_rows:
                counts = torch.from_numpy(share < self.n_windows)
                batch["mask"] = counts[:, None].repeat(1, self.windows.sequence_len)
            yield batch


def _rows_per_batch(windows: TokenWindows, tokens_per_batch: int, world_size: int) -> int:
    """Rows of a global batch."""
    unit = windows.sequence_len * world_size
    if tokens_per_batch < unit or tokens_per_batch % unit:
        rule = f"must be a multiple of sequence_len * ranks = {windows.sequence_len} * {world_size}"
        raise ConfigError(
            "data.tokens_per_batch", tokens_per_batch, rule, f"use {max(1, tokens_per_batch // unit) * unit}"
        )
    return tokens_per_batch // windows.sequence_len


def _share(start: int, n_rows: int, rank: int, world_size: int) -> np.ndarray:
    """The rank's contiguous part of the places start .. start + n_rows - 1 of a global batch."""
    n_local = n_rows // world_size
    return np.arange(start + rank * n_local, start + (rank + 1) * n_local)
