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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from mutransformer.errors import ConfigError
from mutransformer.mup.roles import TENSORS, Kind
from mutransformer.training.module import DecoderModule
from mutransformer.verify.record import NORMS, Coordinate, CoordinateRecorder
from mutransformer.verify.settings import (
    SEED,
    WIDTH,
    Settings,
    build_data,
    build_module,
    build_trainer,
    changed,
    quiet,
    standard,
)
from mutransformer.verify.verdict import Estimate, Finding, Verdict, slope, table

TOLERANCE = 0.25

# activation -> (power of width that it starts with, steps after which it must be flat; until then it may lie between).
# Logits are a sum of width terms of size 1 / width: of random signs at first, of equal signs once training has begun.
TRANSIENTS: Mapping[str, tuple[float, int]] = {"logits": (-0.5, 2)}

# parameter's kind -> power of its fan-in of (initialization, update), forward multiplier included (forms A and B alike)
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
        expected: lowest and highest power of width that muP allows, the tolerance left out; mostly equal.
        power: the power found, over seeds; None where a value is zero or not finite.
        reason: why `power` is None.
    """

    variant: str
    tensor: str
    layer: int
    quantity: str
    step: int
    expected: tuple[float, float]
    power: Estimate | None
    reason: str = ""

    @property
    def passed(self) -> bool:
        return self.distance <= TOLERANCE

    @property
    def distance(self) -> float:
        """How far the power lies from what muP allows; infinite where there is none."""
        low, high = self.expected
        return math.inf if self.power is None else max(low - self.power.mean, self.power.mean - high, 0.0)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What muP asks of the powers of width.

    Args:
        fans: parameter -> powers of width of (its fan-in, its forward multiplier); of decoders alone.
        is_adaptive: whether steps have the size of the learning rate, as Adam's and Lion's have.
        transients: see TRANSIENTS.
    """

    fans: Mapping[str, tuple[float, ...]]
    is_adaptive: bool
    transients: Mapping[str, tuple[float, int]]

    def power(self, tensor: str, quantity: str, step: int) -> tuple[float, float] | None:
        """Lowest and highest power allowed; None where muP says nothing."""
        if quantity == "decay" or (quantity == "update_per_lr" and self.is_adaptive):
            return 0.0, 0.0
        if quantity in ("activation", "change"):
            initial, settled_after = self.transients.get(tensor, (0.0, 0))
            bounds = initial if step < max(settled_after, 1) else 0.0, initial if step == 0 else 0.0
            return min(bounds), max(bounds)
        if tensor not in self.fans or (quantity == "weight" and step > 0) or quantity == "update_per_lr":
            return None
        fan_in, forward = self.fans[tensor]
        at_init, in_update = PARAMETER_POWERS[TENSORS[tensor].kind]
        power = (at_init if quantity == "weight" else in_update) * fan_in - forward
        return power, power


class _Batches:
    """A loader of ready batches; Lightning would take a plain list for a list of loaders."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = list(batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


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
    transients: Mapping[str, tuple[float, int]],
    norms: Sequence[str] = (),
    same_batch: bool = True,
    trainer: Callable[..., Trainer] | None = None,
) -> tuple[list[Row], Asked]:
    """Trains `make(width, seed)` on `batches(seed)` for every width and seed, and records every step.

    Returns:
        The rows, and what is asked of them.
    """
    rows: list[Row] = []
    is_adaptive = True
    fans: dict[str, dict[int, tuple[float, float]]] = {}
    new_trainer = trainer or _plain_trainer
    for width, seed in itertools.product(widths, seeds):
        module = make(width, seed)
        recorder = CoordinateRecorder(norms, same_batch)
        with quiet():
            new_trainer(callbacks=[recorder]).fit(module, _Batches(batches(seed)))
        rows += [Row(variant=variant, width=width, seed=seed, at=at) for at in recorder.rows]
        is_adaptive &= recorder.is_adaptive
        if isinstance(module, DecoderModule):
            for row in module.plan.rows:
                fans.setdefault(row.name, {})[width] = (row.fan_in, row.forward_multiplier)
    powers = {
        name: tuple(slope(list(of), values) for values in zip(*of.values(), strict=True)) for name, of in fans.items()
    }
    return rows, Asked(fans=powers, is_adaptive=is_adaptive, transients=transients)


def _plain_trainer(**options: Any) -> Trainer:
    return Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def series(rows: Sequence[Row], asked: Asked) -> Iterator[Series]:
    """Fits the power of width of everything that muP says something about."""
    grouped: dict[tuple[str, str, int, str, int], dict[int, dict[int, float]]] = {}
    for row in rows:
        at = row.at
        if at.norm == "mean":
            key = (row.variant, at.tensor, at.layer, at.quantity, at.step)
            grouped.setdefault(key, {}).setdefault(row.seed, {})[row.width] = at.value
    for (variant, tensor, layer, quantity, step), by_seed in grouped.items():
        expected = asked.power(tensor, quantity, step)
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
            variant=variant,
            tensor=tensor,
            layer=layer,
            quantity=quantity,
            step=step,
            expected=expected,
            power=power,
            reason=reason,
        )


def judge_coordinates(found: Sequence[Series], *, variant: str, control: str | None) -> Verdict:
    """PASS where every series of `variant` follows the power that muP asks for, and the control does not.

    Args:
        found: from `series`.
        variant: what is being checked.
        control: what must fail; None: nothing was run as control.
    Returns:
        A verdict with a finding for each quantity of each tensor, over its layers and steps.
    """
    ours = _by_tensor([s for s in found if s.variant == variant])
    findings = [_finding(name, members) for name, members in ours.items()]
    if control is not None:
        theirs = _by_tensor([s for s in found if s.variant == control])
        failed = [name for name, members in theirs.items() if not all(s.passed for s in members)]
        reason = f"{len(failed)} of {len(theirs)} quantities leave their power of width" if failed else "it passes too"
        findings.append(Finding(name=f"control {control} fails", passed=bool(failed), reason=reason))
    return Verdict(
        check="coordcheck",
        findings=findings,
        figures={"tolerance": TOLERANCE, "series": [asdict(s) | {"passed": s.passed} for s in found]},
    )


def _by_tensor(found: Iterable[Series]) -> dict[tuple[str, str], list[Series]]:
    grouped: dict[tuple[str, str], list[Series]] = {}
    for one in found:
        grouped.setdefault((one.tensor, one.quantity), []).append(one)
    return grouped


def _finding(name: tuple[str, str], members: Sequence[Series]) -> Finding:
    """The worst of the tensor's layers and steps, and where."""
    tensor, quantity = name
    first = next((s for s in members if not s.passed), None)
    shown = first or max(members, key=lambda s: s.distance)
    where = f"at step {shown.step}" + (f", layer {shown.layer}" if any(s.layer for s in members) else "")
    seen = f"width^({shown.power})" if shown.power else shown.reason
    asked = " to ".join(f"{power:.2g}" for power in dict.fromkeys(shown.expected))
    reason = f"{seen} {where}; muP asks for width^({asked}) within {TOLERANCE:g}"
    if quantity == "decay":
        reason += ", by the optimizer's groups: no activation shows it in a few steps"
    n_failed = sum(not s.passed for s in members)
    return Finding(
        name=f"{tensor} {quantity}",
        passed=first is None,
        reason=reason if first is None else f"{reason} ({n_failed} of {len(members)} steps and layers fail)",
    )


def coordcheck(
    make: Make,
    batches: Callable[[int], Iterable[Any]],
    *,
    widths: Sequence[int],
    seeds: Sequence[int] = (1, 2, 3),
    control: Make | None = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    transients: Mapping[str, tuple[float, int]] = TRANSIENTS,
    norms: Sequence[str] = (),
    same_batch: bool = True,
    trainer: Callable[..., Trainer] | None = None,
    out: Path | str | None = None,
    names: tuple[str, str] = ("mup", "sp"),
) -> Verdict:
    """Trains models of several widths for a few steps, and judges how the size of every tensor depends on width.

    Args:
        make: (width, seed) -> a LightningModule, or with `loss` a pair of an nn.Module and its optimizer. In a
            `Decoder` every tapped activation is judged, in other modules the output of each submodule that has none.
        batches: seed -> the batches to train on, one a step; the same one again and again with `same_batch`.
        widths: at least two, better five over a factor of 16.
        seeds: passed to `make` and `batches`; intervals are over these.
        control: as `make`, for a parametrization that must fail.
        loss: (module, batch) -> scalar, where `make` gives an nn.Module.
        transients: activation -> (power of width that it starts with, steps after which it must be flat).
        norms: `l2` and `max` can be recorded besides `mean`, on which the verdict is.
        same_batch: whether changes of activations are recorded too.
        trainer: makes the Trainer from `callbacks=`; None: a plain one that ends with the batches.
        out: folder for coordcheck.csv, coordcheck.png and verdict.json; None: no files.
        names: of `make` and of `control` in tables and pictures.
    Returns:
        The verdict; `verdict.passed`, and `verdict.failures` with the tensor, step and power of each.
    Raises:
        ConfigError: fewer than two widths, no seed, no such norm, or no step was made.
    Source:
        Tensor Programs V (arXiv 2203.03466, App. D.1); microsoft/mup's get_coord_data, which leaves the judging to you.
    """
    if len(set(widths)) < 2:
        raise ConfigError(
            "widths", list(widths), "a power of width needs two widths at least", "use 64,128,256,512,1024"
        )
    if unknown := set(norms) - set(NORMS):
        raise ConfigError("norms", sorted(unknown), "are not known", f"use some of {', '.join(NORMS)}")
    if not seeds:
        raise ConfigError("seeds", list(seeds), "names no seed", "use 1,2,3")
    rows: list[Row] = []
    found: list[Series] = []
    for name, maker in zip(names, (make, control), strict=True):
        if maker is None:
            continue
        recorded, asked = record(
            maker if loss is None else _wrapped(maker, loss),
            batches,
            variant=name,
            widths=widths,
            seeds=seeds,
            transients=transients,
            norms=norms,
            same_batch=same_batch,
            trainer=trainer,
        )
        rows += recorded
        found += series(recorded, asked)
    if not rows:
        raise ConfigError("batches", ..., "gave none", "give one for each step")
    verdict = judge_coordinates(found, variant=names[0], control=names[1] if control else None)
    if out is not None:
        from mutransformer.verify.plots import plot_coordinates

        Path(out).mkdir(parents=True, exist_ok=True)
        write_rows(rows, Path(out) / "coordcheck.csv")
        plot_coordinates(rows, found, Path(out) / "coordcheck.png")
        verdict.save(Path(out) / "verdict.json")
    return verdict


def coordcheck_of_settings(
    settings: Settings, *, widths: Sequence[int], n_steps: int, control: bool, same_batch: bool, **options: Any
) -> Verdict:
    """The coordinate check of a run's settings, as the command line gives them; other arguments as of `coordcheck`.

    Raises:
        ConfigError: a width that cannot work; before anything is trained.
    """
    data = build_data(settings)
    if n_steps < 1:
        raise ConfigError("steps", n_steps, "must be at least 1", "use 10")
    settings = changed(settings, {"trainer.max_steps": n_steps})

    def maker(base: Settings) -> Make:
        def make(width: int, seed: int) -> DecoderModule:
            return build_module(changed(base, {WIDTH: width, SEED: seed}), data.vocab_size, compile=False)

        for width in widths:
            make(width, 0)
        return make

    def batches(seed: int) -> Iterable[Any]:
        data.shuffle_seed = seed
        data.setup("fit")
        drawn = itertools.islice(itertools.cycle(data.train_dataloader()), n_steps)
        return [next(drawn)] * n_steps if same_batch else drawn

    return coordcheck(
        maker(settings),
        batches,
        control=maker(standard(settings)) if control else None,
        widths=widths,
        same_batch=same_batch,
        trainer=lambda callbacks: build_trainer(settings, callbacks),
        **options,
    )


def _wrapped(make: Make, loss: Callable[[nn.Module, Any], torch.Tensor]) -> Make:
    def wrapped(width: int, seed: int) -> LightningModule:
        model, optimizer = make(width, seed)
        return _Plain(model, optimizer, loss)

    return wrapped


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """All that was recorded, a line a number."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["variant", "width", "seed", *(f.name for f in fields(Coordinate))])
        for row in rows:
            writer.writerow([row.variant, row.width, row.seed, *asdict(row.at).values()])


def report(verdict: Verdict) -> str:
    """The verdict for the terminal: a row a finding, failures last."""
    ordered = sorted(verdict.findings, key=lambda finding: not finding.passed)
    rows = [{"": "ok" if f.passed else "FAIL", "what": f.name, "seen": f.reason} for f in ordered]
    return "\n".join(["", table(rows), *(f"note {note}" for note in verdict.notes), "", str(verdict)])
