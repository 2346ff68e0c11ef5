"""The coordinate check: trains a few steps at several widths, records, and has it judged by `coordinates.py`.

For the command line, by settings, and for anybody's own module, by a function from width to model.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from mutransformer.errors import ConfigError
from mutransformer.training.checkpoint import require_writable
from mutransformer.training.module import DecoderModule
from mutransformer.verify.coordinates import TRANSIENTS, Asked, Row, Series, judge_coordinates, series
from mutransformer.verify.record import NORMS, Coordinate, CoordinateRecorder
from mutransformer.verify.settings import (
    SEED,
    WIDTH,
    Settings,
    build_data,
    build_module,
    build_trainer,
    changed,
    check_seeds,
    quiet,
    standard,
)
from mutransformer.verify.verdict import Verdict, slope, table

Make = Callable[[int, int], Any]


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
    if out is not None:
        require_writable("out", str(out))
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
        from mutransformer.verify.plots import plot_coordinates  # matplotlib: only where it is needed

        write_rows(rows, Path(out) / "coordcheck.csv")
        plot_coordinates(rows, found, Path(out) / "coordcheck.png")
        verdict.save(Path(out) / "verdict.json")
    return verdict


def coordcheck_of_settings(
    settings: Settings,
    *,
    widths: Sequence[int],
    seeds: Sequence[int],
    n_steps: int,
    control: bool,
    same_batch: bool,
    out: str,
    **options: Any,
) -> Verdict:
    """The coordinate check of a run's settings, as the command line gives them; other arguments as of `coordcheck`.

    Raises:
        ConfigError: a width that cannot work; before anything is trained.
    """
    data = build_data(settings)
    if not 1 <= n_steps <= 10_000:
        raise ConfigError("steps", n_steps, "must lie in 1 to 10000", "use 10")
    check_seeds(seeds)
    build_trainer(settings, [])
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

    makers = maker(settings), maker(standard(settings)) if control else None
    data.setup("fit")
    return coordcheck(
        makers[0],
        batches,
        control=makers[1],
        widths=widths,
        seeds=seeds,
        same_batch=same_batch,
        out=out,
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
