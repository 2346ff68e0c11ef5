"""The coordinate check: train a few steps at several widths, and judge how every tensor's size depends on width.

In muP every activation, and every change of it by training, keeps its size as width grows; so do a weight's
initialization and updates, up to a power of its fan-in that is known. A wrong rule shows as another power of width: by
1/2 or more, since all rules are powers of sqrt(width). So what lies within half of that, TOLERANCE, is as it should be.

Source:
    Tensor Programs IV (arXiv 2011.14522) and V (arXiv 2203.03466, App. D.1); docs/proof.md has the argument in full.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from mutransformer.errors import ConfigError
from mutransformer.mup.roles import TENSORS, Kind
from mutransformer.training.module import DecoderModule
from mutransformer.verify.record import Coordinate, CoordinateRecorder
from mutransformer.verify.settings import quiet
from mutransformer.verify.verdict import Estimate, Finding, Verdict, slope

TOLERANCE = 0.25

# activation -> power of width at initialization, where it is not 0: these start small and grow to their size in training
INITIAL_POWERS: Mapping[str, float] = {"logits": -0.5}

# parameter's kind -> power of its fan-in of (initialization, update); a vector's and an input's size never changes
PARAMETER_POWERS: Mapping[Kind, tuple[float, float]] = {
    Kind.INPUT: (0.0, 0.0),
    Kind.HIDDEN: (-0.5, -1.0),
    Kind.OUTPUT: (-1.0, -1.0),
    Kind.VECTOR: (0.0, 0.0),
}

Make = Callable[[int, int], Any]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A `Coordinate` with the run it is from."""

    variant: str
    width: int
    seed: int
    at: Coordinate


@dataclass(frozen=True, kw_only=True)
class Series:
    """All values of one tensor over widths, of one quantity at one step and layer, and the power that they follow.

    Args:
        expected: power of width that muP asks for.
        power: the power found, over seeds; None where a value is zero or not finite.
        reason: why `power` is None.
    """

    variant: str
    tensor: str
    layer: int
    quantity: str
    step: int
    expected: float
    power: Estimate | None
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.power is not None and abs(self.power.mean - self.expected) <= TOLERANCE


class _Plain(LightningModule):
    """A user's nn.Module with its optimizer and loss."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss, self.optimizer = model, loss, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(self.model, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def record(
    make: Make,
    batches: Callable[[int], Iterable[Any]],
    *,
    variant: str,
    widths: Sequence[int],
    seeds: Sequence[int],
    norms: Sequence[str] = ("mean",),
    same_batch: bool = True,
    trainer: Callable[..., Trainer] | None = None,
) -> tuple[list[Row], dict[str, Any]]:
    """Trains `make(width, seed)` on `batches(seed)` for every width and seed, and records every step.

    Returns:
        The rows, and the power of width that each parameter's fan-in follows, by name (of decoders alone).
    """
    rows: list[Row] = []
    fans: dict[str, dict[int, int]] = {}
    new_trainer = trainer or _plain_trainer
    for width, seed in itertools.product(widths, seeds):
        module = make(width, seed)
        recorder = CoordinateRecorder(tuple(norms), same_batch)
        with quiet():
            new_trainer(callbacks=[recorder]).fit(module, DataLoader(list(batches(seed)), batch_size=None))
        rows += [Row(variant=variant, width=width, seed=seed, at=at) for at in recorder.rows]
        if isinstance(module, DecoderModule):
            for row in module.plan.rows:
                fans.setdefault(row.name, {})[width] = row.fan_in
    return rows, {name: slope(list(of), list(of.values())) for name, of in fans.items()}


def _plain_trainer(**options: Any) -> Trainer:
    return Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options
    )


def series(rows: Sequence[Row], fan_in_powers: Mapping[str, float], initial: Mapping[str, float]) -> Iterator[Series]:
    """Fits the power of width of everything that muP says something about."""
    grouped: dict[tuple[str, str, int, str, int], dict[int, dict[int, float]]] = {}
    for row in rows:
        at = row.at
        if at.norm == "mean":
            key = (row.variant, at.tensor, at.layer, at.quantity, at.step)
            grouped.setdefault(key, {}).setdefault(row.seed, {})[row.width] = at.value
    for (variant, tensor, layer, quantity, step), by_seed in grouped.items():
        expected = _expected(tensor, quantity, step, fan_in_powers, initial)
        values = [value for of in by_seed.values() for value in of.values()]
        if expected is None or not any(values):  # all zero: nothing there yet, as with a zero initialization
            continue
        power, reason = None, ""
        if not all(map(math.isfinite, values)):
            reason = "is not finite"
        elif not all(values):
            reason = "is zero at some widths"
        else:
            power = Estimate.over_seeds([slope(list(of), list(of.values())) for of in by_seed.values()])
        yield Series(
            variant=variant, tensor=tensor, layer=layer, quantity=quantity, step=step, expected=expected, power=power, reason=reason
        )


def _expected(
    tensor: str, quantity: str, step: int, fan_in_powers: Mapping[str, float], initial: Mapping[str, float]
) -> float | None:
    """Power of width that muP asks for; None where it says nothing."""
    if quantity in ("change", "decay", "update_per_lr"):
        return 0.0
    if quantity == "activation":
        return initial.get(tensor, 0.0) if step == 0 else 0.0
    if tensor not in fan_in_powers:
        return None
    at_init, in_update = PARAMETER_POWERS[TENSORS[tensor].kind]
    if quantity == "weight":
        return at_init * fan_in_powers[tensor] if step == 0 else None
    return in_update * fan_in_powers[tensor]
