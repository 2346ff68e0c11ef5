from __future__ import annotations

import hashlib
import threading
from itertools import chain, count, islice

import numpy as np
import pytest
import torch

from mutransformer.data import windows as windows_file
from mutransformer.data.windows import InOrderLoader, TokenStream, TokenWindows, WindowLoader
from mutransformer.errors import ConfigError

L = 4


def stream_of(*shards, starts=None, n_bytes=0) -> TokenStream:
    tokens = [np.array(shard, np.uint16) for shard in shards]
    starts = [np.array(s, np.int64) for s in (starts or [[] for _ in shards])]
    sha256 = hashlib.sha256(b"".join(map(bytes, tokens))).hexdigest()
    return TokenStream(tokens, starts, n_bytes=n_bytes, sha256=sha256)


def counting_windows(n_windows: int, n_extra_tokens: int = 0, sequence_len: int = L) -> TokenWindows:
    """Windows over the stream 0, 1, 2, ..., so that a token says where it was read."""
    n_tokens = n_windows * sequence_len + 1 + n_extra_tokens
    return TokenWindows(stream_of(range(n_tokens), n_bytes=n_tokens), sequence_len)


def window_numbers(batches) -> list[list[int]]:
    return [(batch["tokens"][:, 0] // L).tolist() for batch in batches]


def epoch_of(loader) -> list[int]:
    return list(chain.from_iterable(window_numbers(loader)))


def error_of(field: str, function, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*args, **kwargs)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The stream and its windows


def test_bytes_per_token_counts_separators_as_tokens():
    assert TokenWindows(stream_of(range(8), n_bytes=4), 2).bytes_per_token == 4 / 7


def test_heads_are_beginnings_of_documents_from_all_over_the_stream():
    """Separators are 0; the last one closes the stream."""
    stream = stream_of([0, 11, 12, 13, 0, 21], [0, 31, 32, 33, 34, 0, 41, 42, 0], starts=[[0, 4], [0, 5]])
    assert stream.n_documents == 4
    assert stream.heads(4, 3) == [[0, 11, 12, 13], [0, 21], [0, 31, 32, 33], [0, 41, 42]]
    assert stream.heads(2, 1) == [[0, 11], [0, 31]]
    assert stream.heads(1, 0) == [[0]]


@pytest.mark.parametrize("n_extra_tokens", range(L))
def test_each_token_but_the_first_is_a_target_once(n_extra_tokens):
    windows = counting_windows(5, n_extra_tokens)
    tokens = windows.batch(np.arange(windows.n_windows))["tokens"]
    assert tokens.dtype == torch.int64
    assert tokens.shape == (5, L + 1)
    assert torch.equal(tokens[:, 1:].flatten(), torch.arange(1, 5 * L + 1))
    assert torch.equal(tokens[:, :-1] + 1, tokens[:, 1:])
    assert windows.n_leftover_tokens == n_extra_tokens
    with pytest.raises(IndexError):
        windows.batch(np.array([5]))


def test_windows_come_in_the_order_asked_for():
    assert counting_windows(5).batch(np.array([3, 0]))["tokens"].tolist() == [[12, 13, 14, 15, 16], [0, 1, 2, 3, 4]]


def test_stream_shorter_than_a_window_is_refused():
    message = error_of("data.sequence_len", TokenWindows, stream_of(range(4)), 4)
    assert "use at most 3" in message
    assert TokenWindows(stream_of(range(4)), 3).n_windows == 1


# Training batches


def test_epoch_reads_each_window_once_but_the_leftover():
    loader = WindowLoader(counting_windows(23), 5 * L)
    batches = window_numbers(loader)
    assert len(batches) == len(loader) == 4
    assert [len(batch) for batch in batches] == [5] * 4
    read = list(chain.from_iterable(batches))
    assert len(set(read)) == 20 and set(read) <= set(range(23))
    assert loader.n_leftover_windows == 3


def test_epochs_differ_and_seeds_differ():
    def epochs(seed):
        loader = WindowLoader(counting_windows(20), 5 * L, seed=seed)
        return [epoch_of(loader) for _ in range(3)]

    first = epochs(seed=0)
    assert all(sorted(epoch) == list(range(20)) for epoch in first)
    assert first[0] != first[1] != first[2] != first[0]
    assert first == epochs(seed=0)
    assert not any(a == b for a, b in zip(first, epochs(seed=1), strict=True))


def test_without_shuffle_windows_come_in_order():
    loader = WindowLoader(counting_windows(7), 3 * L, shuffle=False)
    assert window_numbers(loader) == window_numbers(loader) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("make", [WindowLoader, InOrderLoader])
@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_ranks_together_read_the_global_batch(make, world_size):
    windows = counting_windows(30)
    alone = [batch["tokens"] for batch in make(windows, 6 * L)]
    ranks = [
        [batch["tokens"] for batch in make(windows, 6 * L, rank=rank, world_size=world_size)]
        for rank in range(world_size)
    ]
    assert len(alone) == 5
    for batch, shares in zip(alone, zip(*ranks, strict=True), strict=True):
        assert {len(share) for share in shares} == {6 // world_size}
        assert torch.equal(torch.cat(shares), batch)


@pytest.mark.parametrize("make", [WindowLoader, InOrderLoader])
@pytest.mark.parametrize("tokens_per_batch, would_do", [(7 * L, 6 * L), (L, 3 * L), (6 * L + 1, 6 * L)])
def test_batch_that_ranks_cannot_share_is_refused(make, tokens_per_batch, would_do):
    windows = counting_windows(30)
    message = error_of("data.tokens_per_batch", make, windows, tokens_per_batch, world_size=3)
    assert message.endswith(f"use {would_do}")
    make(windows, would_do, world_size=3)


@pytest.mark.parametrize("world_size, would_do", [(1, 5 * L), (2, 4 * L)])
def test_fewer_windows_than_a_batch_are_refused(world_size, would_do):
    windows = counting_windows(5)
    message = error_of("data.tokens_per_batch", WindowLoader, windows, 6 * L, world_size=world_size)
    assert message.endswith(f"use at most {would_do}")
    assert len(WindowLoader(windows, would_do, world_size=world_size)) == 1


def test_fewer_windows_than_ranks_are_refused():
    error_of("data.tokens_per_batch", WindowLoader, counting_windows(2), 3 * L, world_size=3)


# The place in the data


def endlessly(loader):
    while True:
        yield from loader


def test_resumes_at_any_batch():
    windows = counting_windows(23)
    expected = window_numbers(islice(endlessly(WindowLoader(windows, 5 * L)), 12))
    for n_before in range(12):
        first = WindowLoader(windows, 5 * L)
        before = window_numbers(islice(endlessly(first), n_before))
        state = first.state_dict()
        assert (state["epoch"], state["batch"]) == divmod(n_before, 4)
        second = WindowLoader(windows, 5 * L)
        second.load_state_dict(state)
        rest_of_epoch = window_numbers(second)
        assert len(rest_of_epoch) == 4 - n_before % 4
        after = window_numbers(islice(endlessly(second), 12 - n_before - len(rest_of_epoch)))
        assert before + rest_of_epoch + after == expected


def test_state_holds_plain_numbers_and_strings():
    loader = WindowLoader(counting_windows(23), 5 * L)
    next(iter(loader))
    state = loader.state_dict()
    assert {type(value) for value in state.values()} == {int, str}
    assert (state["epoch"], state["batch"]) == (0, 1)


def test_a_second_iterator_loses_nothing():
    loader = WindowLoader(counting_windows(20), 5 * L)
    expected = window_numbers(WindowLoader(counting_windows(20), 5 * L))
    iter(loader)
    unused = iter(loader)
    assert window_numbers([next(iter(loader))]) == expected[:1]
    assert window_numbers(loader) == expected[1:]
    assert window_numbers([next(unused)]) != expected[:1]  # it would go on in the next epoch


def test_slow_disk_is_read_ahead_by_a_thread(monkeypatch):
    """The same batches, one of them on its way while another is used; a fast disk needs no thread."""
    windows, readers = counting_windows(40), []
    expected = window_numbers(islice(endlessly(WindowLoader(windows, 5 * L)), 20))
    read = TokenWindows.batch

    def noted(self, indices):
        readers.append(threading.current_thread() is threading.main_thread())
        return read(self, indices)

    monkeypatch.setattr(TokenWindows, "batch", noted)
    monkeypatch.setattr(windows_file, "_disk_reads", lambda: 0)
    assert window_numbers(WindowLoader(windows, 5 * L)) == expected[:8]
    assert readers == [True] * 8
    monkeypatch.setattr(windows_file, "_disk_reads", count().__next__)
    readers.clear()
    loader = WindowLoader(windows, 5 * L)
    batches = window_numbers(islice(loader, 3))
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (0, 3)  # of what was given out, not of what was read
    batches += window_numbers(islice(endlessly(loader), 17))
    assert batches == expected
    assert readers.count(True) == 4  # the first of each iterator


def other_tokens(windows: TokenWindows) -> TokenWindows:
    (tokens,) = windows.stream.shards
    return TokenWindows(stream_of([*tokens[:-1], 0]), windows.sequence_len)


@pytest.mark.parametrize(
    "field, item, change",
    [
        ("data.sequence_len", "sequence_len", lambda: WindowLoader(counting_windows(46, sequence_len=2), 20)),
        ("data.tokens_per_batch", "rows_per_batch", lambda: WindowLoader(counting_windows(23), 6 * L)),
        ("data.shuffle_seed", "shuffle_seed", lambda: WindowLoader(counting_windows(23), 5 * L, seed=1)),
        ("data.dataset", "shuffle", lambda: WindowLoader(counting_windows(23), 5 * L, shuffle=False)),
        ("data.dataset", "tokens_sha256", lambda: WindowLoader(other_tokens(counting_windows(23)), 5 * L)),
        ("data.dataset", "tokens_sha256", lambda: WindowLoader(counting_windows(24), 5 * L)),
    ],
)
def test_state_of_other_data_is_refused(field, item, change):
    state = WindowLoader(counting_windows(23), 5 * L).state_dict()
    other = change()
    message = error_of(field, other.load_state_dict, state)
    assert f"{item}={state[item]!r}" in message
    assert f"{item}={other.state_dict()[item]!r}" in message
    assert state[item] != other.state_dict()[item]


def test_state_fits_any_number_of_ranks():
    windows = counting_windows(23)
    alone = WindowLoader(windows, 6 * L)
    expected = [batch["tokens"] for batch in alone]
    alone = WindowLoader(windows, 6 * L)
    next(iter(alone))
    ranks = [WindowLoader(windows, 6 * L, rank=rank, world_size=2) for rank in range(2)]
    for loader in ranks:
        loader.load_state_dict(alone.state_dict())
    for batch, *shares in zip(expected[1:], *ranks, strict=True):
        assert torch.equal(torch.cat([share["tokens"] for share in shares]), batch)


# Validation batches


def test_validation_reads_all_windows_in_order_each_time():
    loader = InOrderLoader(counting_windows(7), 3 * L)
    expected = [[0, 1, 2], [3, 4, 5], [6]]
    assert len(loader) == 3
    assert window_numbers([next(iter(loader))]) == expected[:1]
    assert window_numbers(loader) == window_numbers(loader) == expected


def test_validation_may_have_fewer_windows_than_a_batch():
    assert window_numbers(InOrderLoader(counting_windows(2), 6 * L)) == [[0, 1]]


@pytest.mark.parametrize(("n_windows", "n_rows"), [(8, 6), (8, 9), (2, 3), (7, 3)])
def test_validation_gives_ranks_equally_many_rows_and_each_window_counts_once(n_windows, n_rows):
    ranks = [list(InOrderLoader(counting_windows(n_windows), n_rows * L, rank=rank, world_size=3)) for rank in range(3)]
    counted = []
    for batches in zip(*ranks, strict=True):
        assert len({batch["tokens"].shape for batch in batches}) == 1
        assert len({"mask" in batch for batch in batches}) == 1
        for batch in batches:
            mask = batch.get("mask", torch.ones_like(batch["tokens"][:, 1:], dtype=torch.bool))
            assert mask.shape == batch["tokens"][:, 1:].shape and torch.equal(mask.all(1), mask.any(1))
            counted += window_numbers([{"tokens": batch["tokens"][mask.all(1)]}])[0]
    assert sorted(counted) == list(range(n_windows))


def test_validation_of_the_first_windows_alone():
    assert window_numbers(InOrderLoader(counting_windows(7), 3 * L, limit=4)) == [[0, 1, 2], [3]]
    assert window_numbers(InOrderLoader(counting_windows(2), 3 * L, limit=4)) == [[0, 1]]
