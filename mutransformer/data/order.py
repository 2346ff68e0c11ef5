"""In which order an epoch reads its windows. Read by `windows.py`; imports no other room.

The order is a pure function of (seed, epoch): nothing has to be stored to resume, and every host computes the same one.
"""

from __future__ import annotations

import numpy as np


def window_order(n_windows: int, epoch: int, seed: int) -> np.ndarray:
    """Returns the order in which epoch `epoch` reads the windows.

    Args:
        n_windows: how many windows there are; at least 0.
        epoch: number of the epoch; from 0 up.
        seed: `data.shuffle_seed`; from 0 up.
    Returns:
        A permutation of 0 .. n_windows - 1.
    Shapes:
        -> [n_windows] int64
    """
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n_windows)
