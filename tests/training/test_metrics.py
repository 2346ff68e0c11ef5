from __future__ import annotations

import pytest
import torch

from mutransformer.training.metrics import TokenMean


def test_mean_is_over_targets_whatever_the_batches():
    mean = TokenMean()
    mean.update(torch.tensor(30.0), 10)
    mean.update(torch.tensor(4.0), torch.tensor(2))
    mean.update(torch.tensor(0.0), torch.tensor(0))
    assert mean.compute().item() == pytest.approx(34 / 12, rel=1e-15)
    mean.reset()
    mean.update(torch.tensor(1.0), 4)
    assert mean.compute().item() == 0.25


def test_a_loss_that_is_not_a_number_is_not_dropped():
    mean = TokenMean()
    for loss_sum in (1.0, float("nan"), 1.0):
        mean.update(torch.tensor(loss_sum), 1)
    assert mean.compute().isnan()


def test_many_small_batches_add_up_as_one():
    mean = TokenMean()
    for _ in range(10_000):
        mean.update(torch.tensor(0.1), 1)
    # float32 would have lost three more digits over 1e4 additions
    assert mean.compute().item() == pytest.approx(float(torch.tensor(0.1)), rel=1e-10)
