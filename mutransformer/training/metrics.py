"""The evaluation loss as a torchmetrics metric, so that it adds up over batches, epochs and processes."""

from __future__ import annotations

import torch
from torchmetrics import Metric


class TokenMean(Metric):
    """Mean loss over target tokens, whatever their number in each batch; NaN where a batch's loss is.

    Sums are kept in float64, counts as integers. (torchmetrics' MeanMetric with `nan_strategy="disable"` leaves the
    weights out, with the others it drops a NaN.)
    """

    full_state_update = False
    loss_sum: torch.Tensor
    n_targets: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss_sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("n_targets", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss_sum: torch.Tensor, n_targets: torch.Tensor | int) -> None:
        """Adds a batch: sum of its losses in nats, number of its targets that count; from any device."""
        self.loss_sum += loss_sum.to(self.loss_sum.device)
        self.n_targets += n_targets if isinstance(n_targets, int) else n_targets.to(self.n_targets.device)

    def compute(self) -> torch.Tensor:
        """Nats a target token, a float64 scalar."""
        return self.loss_sum / self.n_targets
