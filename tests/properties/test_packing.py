"""Of any corpus, in any shards: every token is a target once, at any batch, number of hosts and place of resuming."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mutransformer.data.windows import InOrderLoader, TokenStream, TokenWindows, WindowLoader

# documents by their length, each in one of up to six shards
corpora = st.lists(st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=6)


def stream_of(corpus: list[list[int]]) -> tuple[TokenStream, list[int]]:
    """The stream 0, 1, 2, ... with documents of these lengths and a separator before each, and where each starts."""
    shards, starts, n = [], [], 0
    for lengths in corpus:
        begins = np.cumsum([0, *(length + 1 for length in lengths)])
        shards.append(np.arange(n, n + begins[-1], dtype=np.uint32))
        starts.append(begins[:-1].astype(np.int64))
        n += int(begins[-1])
    shards[-1] = np.append(shards[-1], np.uint32(n))  # the last separator
    whole_starts = [int(shard[start]) for shard, begins in zip(shards, starts, strict=True) for start in begins]
    return TokenStream(shards, starts, n_bytes=0, sha256=""), whole_starts


@given(corpora, st.integers(1, 40), st.data())
def test_windows_are_the_stream_whatever_the_shards(corpus, sequence_len, data):
    stream, starts = stream_of(corpus)
    assume(len(stream) > sequence_len)
    windows = TokenWindows(stream, sequence_len, attend_across_documents=False)
    indices = data.draw(st.lists(st.integers(0, windows.n_windows - 1), min_size=1, max_size=8))
    batch = windows.batch(np.array(indices))
    expected = [list(range(i * sequence_len, i * sequence_len + sequence_len + 1)) for i in indices]
    assert batch["tokens"].tolist() == expected
    for row, positions in zip(expected, batch["positions"].tolist(), strict=True):
        begins = {0, *(token - row[0] for token in starts if row[0] <= token < row[-1])}
        assert positions == [i - max(begin for begin in begins if begin <= i) for i in range(sequence_len)]


@given(st.integers(1, 200), st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 4), st.integers(0, 3), st.data())
def test_an_epoch_gives_each_window_once_to_one_host(n_windows, world_size, rows_per_host, seed, data):
    stream, _ = stream_of([[0] * (2 * n_windows)])
    windows = TokenWindows(stream, 2)
    n_rows = world_size * rows_per_host
    assume(windows.n_windows >= n_rows)
    n_batches = windows.n_windows // n_rows
    n_before = data.draw(st.integers(0, 2 * n_batches))
    first = WindowLoader(windows, 2 * n_rows, seed=seed)
    before = take(first, n_before)
    # from there on another number of hosts; the global batch stays
    hosts = [
        WindowLoader(windows, 2 * n_rows, seed=seed, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    for host in hosts:
        host.load_state_dict(first.state_dict())
    parts = [take(host, 2 * n_batches - n_before) for host in hosts]
    after = [list(chain.from_iterable(shares)) for shares in zip(*parts, strict=True)]
    whole = take(WindowLoader(windows, 2 * n_rows, seed=seed), 2 * n_batches)
    assert before + after == whole
    for epoch in (whole[:n_batches], whole[n_batches:]):
        read = list(chain.from_iterable(epoch))
        assert len(read) == len(set(read)) == n_batches * n_rows
        assert set(read) <= set(range(windows.n_windows))


@given(st.integers(1, 200), st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 4))
def test_validation_gives_each_window_once_to_one_host(n_windows, world_size, rows_per_host):
    stream, _ = stream_of([[0] * (2 * n_windows)])
    windows = TokenWindows(stream, 2)
    tokens_per_batch = 2 * world_size * rows_per_host
    hosts = [InOrderLoader(windows, tokens_per_batch, rank=rank, world_size=world_size) for rank in range(world_size)]
    batches = [batch for host in hosts for batch in host]
    read = [
        numbers({"tokens": batch["tokens"][batch["mask"].all(1)]} if "mask" in batch else batch) for batch in batches
    ]
    assert sorted(chain.from_iterable(read)) == list(range(windows.n_windows))


def numbers(batch: dict[str, torch.Tensor]) -> list[int]:
    """Numbers of a batch's windows of two tokens."""
    return (batch["tokens"][:, 0] // 2).tolist()


def take(loader: WindowLoader, n: int) -> list[list[int]]:
    batches: list[list[int]] = []
    while len(batches) < n:
        for batch in loader:
            batches.append(numbers(batch))
            if len(batches) == n:
                break
    return batches
