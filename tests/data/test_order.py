from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutransformer.data.order import window_at


def order(n_windows: int, **options) -> np.ndarray:
    return window_at(np.arange(n_windows), n_windows, **options)


@given(st.integers(0, 3000), st.integers(0, 5), st.integers(0, 2**40))
def test_order_is_a_permutation(n_windows, epoch, seed):
    assert np.array_equal(np.sort(order(n_windows, epoch=epoch, seed=seed)), np.arange(n_windows))


@given(st.data(), st.integers(1, 3000))
def test_a_place_has_its_window_whatever_else_is_asked_for(data, n_windows):
    places = np.array(data.draw(st.lists(st.integers(0, n_windows - 1), max_size=20)), np.int64)
    assert np.array_equal(window_at(places, n_windows, epoch=1, seed=2), order(n_windows, epoch=1, seed=2)[places])


def test_order_depends_on_seed_and_epoch_alone():
    first = order(1000, epoch=0, seed=0)
    np.random.seed(1)  # noqa: NPY002  the global generator must not matter
    assert np.array_equal(first, order(1000, epoch=0, seed=0))
    others = [order(1000, epoch=epoch, seed=seed) for epoch, seed in ((1, 0), (0, 1), (1, 1), (0, 10), (10, 0))]
    for other in others:  # two random orders agree in about one place
        assert (first == other).sum() < 10
    assert not np.array_equal(first, np.arange(1000))


@pytest.mark.parametrize("n_windows", [5, 16, 23, 100])
def test_every_window_comes_at_every_place_equally_often(n_windows):
    """Chi-squared over places and windows; 6 standard deviations of its distribution, and a bad order as control."""
    n_orders = 4000

    def chi_squared(orders) -> float:
        counts = np.zeros((n_windows, n_windows))
        for one in orders:
            counts[np.arange(n_windows), one] += 1
        expected = n_orders / n_windows
        return float(((counts - expected) ** 2 / expected).sum())

    degrees = (n_windows - 1) ** 2
    limit = degrees + 6 * np.sqrt(2 * degrees)
    assert chi_squared(order(n_windows, epoch=epoch, seed=3) for epoch in range(n_orders)) < limit
    lazy = (
        np.arange(n_windows) if epoch % 4 == 0 else order(n_windows, epoch=epoch, seed=3) for epoch in range(n_orders)
    )
    assert chi_squared(lazy) > limit


def test_neighbours_are_torn_apart():
    steps = np.diff(order(10_000, epoch=0, seed=0))
    assert (np.abs(steps) < 10).mean() < 0.01  # 0.002 for a random order


def test_order_is_the_one_that_checkpoints_were_written_with():
    assert order(8, epoch=2, seed=1).tolist() == [1, 2, 0, 3, 4, 6, 7, 5], (
        "the order of windows changed: checkpoints of earlier versions would go on in another order. "
        "If that is meant, write it into the change log and renew the numbers here"
    )


def test_a_batch_in_the_middle_of_a_billion_windows_costs_neither_memory_nor_time():
    places = np.arange(123_456_789, 123_456_789 + 32)
    tracemalloc.start()
    start = time.perf_counter()
    windows = window_at(places, 10**9, epoch=7, seed=1)
    elapsed_s = time.perf_counter() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(windows.tolist())) == 32 and windows.max() < 10**9
    assert peak < 100_000
    assert elapsed_s < 0.5  # 0.3 ms on an idle core; a list of all windows would take ten seconds


def test_no_windows_and_one():
    assert order(0, epoch=0, seed=0).shape == (0,)
    assert order(1, epoch=0, seed=0).tolist() == [0]
