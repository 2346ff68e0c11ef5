"""In which order an epoch reads its windows. Read by `windows.py`; imports no other room.

The order is a pure function of (n_windows, seed, epoch), computed for the places asked for alone: no list of all
windows is ever made, nothing has to be stored to resume, and every host computes the same one.
"""

from __future__ import annotations

import hashlib

import numpy as np

_N_ROUNDS = 8


def window_at(places: np.ndarray, n_windows: int, *, epoch: int, seed: int) -> np.ndarray:
    """Returns which windows epoch `epoch` reads at these places: a permutation of all, seen at some.

    Args:
        places: from 0 up and below n_windows.
        n_windows: how many windows there are; up to 2^62.
        epoch: number of the epoch; from 0 up.
        seed: `data.shuffle_seed`; from 0 up.
    Returns:
        Numbers of windows; over all places each of 0 .. n_windows - 1 once.
    Shapes:
        [n] int -> [n] int64
    Source:
        A Feistel network (Luby and Rackoff 1988) over the next power of two, walked until it lands below n_windows
        (Black and Rogaway 2002): fewer than two steps a place on average.
    """
    assert 0 <= n_windows <= 2**62
    n_bits = max(2, (n_windows - 1).bit_length())
    keys = _keys(n_windows, epoch, seed)
    windows = np.array(places, np.uint64)
    outside = np.ones(windows.shape, bool)
    while outside.any():
        windows[outside] = _feistel(windows[outside], n_bits, keys)
        outside = windows >= n_windows
    return windows.astype(np.int64)


def _keys(n_windows: int, epoch: int, seed: int) -> np.ndarray:
    """A 64-bit key a round."""
    digest = hashlib.shake_128(f"{seed},{epoch},{n_windows}".encode()).digest(8 * _N_ROUNDS)
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def _feistel(numbers: np.ndarray, n_bits: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of 0 .. 2^n_bits - 1; the halves change places each round, of n_bits // 2 and the other bits."""
    n_right = n_bits // 2
    n_left = n_bits - n_right
    left, right = numbers >> np.uint64(n_right), numbers & np.uint64(2**n_right - 1)
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & np.uint64(2**n_left - 1))
        n_left, n_right = n_right, n_left
    return left << np.uint64(n_right) | right


def _mixed(x: np.ndarray) -> np.ndarray:
    """Bits well mixed, the finalizer of splitmix64 (Steele, Lea and Flood 2014); overflow is meant."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
