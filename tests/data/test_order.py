from __future__ import annotations

import numpy as np

from mutransformer.data.order import window_order


def test_order_is_a_permutation():
    order = window_order(1000, epoch=3, seed=5)
    assert np.array_equal(np.sort(order), np.arange(1000))
    assert not np.array_equal(order, np.arange(1000))


def test_order_depends_on_seed_and_epoch_alone():
    order = window_order(1000, epoch=0, seed=0)
    np.random.seed(1)  # noqa: NPY002  the global generator must not matter
    assert np.array_equal(order, window_order(1000, epoch=0, seed=0))
    assert not np.array_equal(order, window_order(1000, epoch=1, seed=0))
    assert not np.array_equal(order, window_order(1000, epoch=0, seed=1))
    assert not np.array_equal(window_order(1000, epoch=1, seed=0), window_order(1000, epoch=0, seed=1))


def test_order_is_the_one_that_checkpoints_were_written_with():
    assert window_order(8, epoch=2, seed=1).tolist() == [6, 0, 7, 5, 1, 4, 3, 2], (
        "the order of windows changed: checkpoints of earlier versions would go on in another order. "
        "If that is meant, write it into the change log and renew the numbers here"
    )


def test_no_windows():
    assert window_order(0, epoch=0, seed=0).shape == (0,)
