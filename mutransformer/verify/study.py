"""Runs a study's points, keeps its table, and draws and judges once all are there. Called by the command line."""

from __future__ import annotations

import csv
import io
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from mutransformer.data.datamodule import TextDataModule
from mutransformer.errors import CheckFailed, Interrupted
from mutransformer.training.checkpoint import require_writable
from mutransformer.verify.points import Point, Result, Store, run, write_whole
from mutransformer.verify.search import Space, constants, finalists, search_points, write_best
from mutransformer.verify.settings import (
    LEARNING_RATE,
    Settings,
    build_data,
    build_module,
    build_trainer,
    changed,
)
from mutransformer.verify.transfer import Grid, Sweep, fixed_settings_that_vary, judge_search, judge_transfer, sweeps
from mutransformer.verify.verdict import Verdict, table


def transfer(
    settings: Settings,
    grid: Grid,
    folder: Path,
    *,
    n_jobs: int = 1,
    shard: tuple[int, int] = (1, 1),
    loggers: Sequence[Logger] = (),
) -> Verdict | None:
    """Trains the grid's points that are not done, then judges.

    Args:
        settings: of a run; the grid changes them.
        grid: what varies.
        folder: `points/`, `transfer.csv`, `transfer.png`, `wider.png` and `verdict.json` lie here.
        n_jobs: processes side by side.
        shard: (i, n): only every n-th point, from the i-th, i from 1. The points of other shards are read where the
            folder has them.
        loggers: get the results by size, and Weights & Biases the pictures.
    Returns:
        The verdict; None while points of other shards are missing.
    Raises:
        ConfigError: a point whose settings cannot work; before anything is trained.
        CheckFailed: points ended with an error of their own, once all others are done.
        Interrupted: by SIGINT or SIGTERM; what is done is kept.
    """
    points = grid.points(settings)
    warnings = fixed_settings_that_vary(points)
    results = run_points(points, folder, "transfer.csv", n_jobs=n_jobs, shard=shard, warnings=warnings)
    if len(results) < len(points):
        print(f"{len(results)} of {len(points)} points are in {folder}: the verdict needs all")
        return None
    found = sweeps([(point, results[point.key]) for point in points], grid.size_key)
    warmup_steps = settings["model"]["schedule"]["warmup_steps"]
    verdict = judge_transfer(found, size_name=grid.size_name, warmup_steps=warmup_steps, notes=warnings)
    _finish(found, verdict, grid.size_name, folder, settings, loggers)
    return verdict


def _finish(
    found: Sequence[Sweep],
    verdict: Verdict,
    size_name: str,
    folder: Path,
    settings: Settings,
    loggers: Sequence[Logger],
) -> None:
    """Draws, saves, prints and logs."""
    from mutransformer.verify.plots import plot_transfer, plot_wider

    verdict.save(folder / "verdict.json")
    print(report(found, size_name, verdict))
    plot_transfer(found, size_name, folder / "transfer.png")
    plot_wider(found, size_name, folder / "wider.png")
    by_size: dict[int, dict[str, float]] = {}
    for sweep in found:
        for i, size in enumerate(sweep.sizes):
            by_size.setdefault(int(size), {}).update(
                {
                    f"{sweep.name}/best_log2_learning_rate": float(sweep.exponents[sweep.best[i]]),
                    f"{sweep.name}/loss_at_best": float(sweep.loss[i, sweep.best[i]].mean()),
                    f"{sweep.name}/regret": sweep.regret(i).mean,
                }
            )
    for logger in loggers:
        logger.log_hyperparams(dict(settings))
        for size in sorted(by_size):
            logger.log_metrics(by_size[size], step=size)
        if isinstance(logger, WandbLogger):
            logger.log_image("pictures", [str(folder / name) for name in ("transfer.png", "wider.png")])
            logger.experiment.summary["passed"] = verdict.passed
            logger.experiment.finish()
        logger.finalize("success")


def run_points(
    points: Sequence[Point],
    folder: Path,
    table_name: str,
    *,
    n_jobs: int,
    shard: tuple[int, int],
    warnings: Sequence[str] = (),
) -> dict[str, Result]:
    """Trains this shard's points that are not done; returns all results in the folder, by the points' keys."""
    index, count = shard
    mine, store = points[index - 1 :: count], Store(folder)
    results = {point.key: result for point in points if (result := store.load(point)) is not None}
    if any(point.key not in results for point in points):
        _check(points)
        require_writable("out", str(folder))
        for name in ("verdict.json", "transfer.png", "wider.png"):  # of a study that had fewer points
            (folder / name).unlink(missing_ok=True)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    progress = _Progress(sum(point.key not in results for point in mine))

    def on_result(point: Point, result: Result) -> None:
        if point.key in results:
            return
        results[point.key] = result
        _write_table(points, results, folder / table_name)
        progress.show(point, result)

    _write_table(points, results, folder / table_name)
    with _signals(lambda: f"{len(results)} of {len(points)} points are in {folder}; the same command goes on"):
        run(mine, store, n_jobs, on_result)
    # other shards may have been at work in the same folder
    results |= {point.key: result for point in points if (result := store.load(point)) is not None}
    _write_table(points, results, folder / table_name)
    if n_failed := sum(result.status == "failed" for result in results.values()):
        raise CheckFailed(f"{n_failed} points failed, see {folder / table_name}; the same command tries them again")
    return results


def _check(points: Sequence[Point]) -> None:
    """Raises ConfigError for a point that cannot work, before any is trained; makes the token caches on the way."""
    opened: dict[str, TextDataModule] = {}
    for point in points:
        build_trainer(point.settings, [])
        shared = {name: value for name, value in point.settings["data"].items() if name != "shuffle_seed"}
        key = json.dumps(shared, sort_keys=True)
        if key not in opened:
            opened[key] = build_data(point.settings)
            opened[key].setup("fit")
        build_module(point.settings, opened[key].vocab_size)  # a plan, no weights


class _Progress:
    """A line a point: how many are done, what came out, how long the rest may take."""

    def __init__(self, n_left: int) -> None:
        self._n_left, self._n_done, self._start = n_left, 0, time.monotonic()

    def show(self, point: Point, result: Result) -> None:
        self._n_done += 1
        rest_s = (time.monotonic() - self._start) / self._n_done * (self._n_left - self._n_done)
        what = " ".join(f"{key.rpartition('.')[2]}={_short(value)}" for key, value in point.changes.items())
        outcome = f"loss {result.final_loss():.4f}" if result.status == "done" else f"{result.status} {result.error}"
        print(
            f"[{self._n_done}/{self._n_left}, {rest_s / 60:.0f} min left] {point.variant} {what}: {outcome}", flush=True
        )


def _short(value: Any) -> str:
    return f"2^{math.log2(value):.3g}" if isinstance(value, float) and value > 0 else str(value)


def _write_table(points: Sequence[Point], results: Mapping[str, Result], path: Path) -> None:
    """One row a point that has a result."""
    rows = [
        {
            "variant": point.variant,
            **point.changes,
            "status": result.status,
            "loss": result.final_loss(),
            "steps": len(result.losses),
            "seconds": round(result.seconds, 2),
            "error": result.error,
            "point": point.key,
        }
        for point in points
        if (result := results.get(point.key)) is not None
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue())


def report(found: Sequence[Sweep], size_name: str, verdict: Verdict) -> str:
    """The verdict for the terminal: a row a size, then what was judged."""
    rows = []
    for sweep in found:
        for i, size in enumerate(sweep.sizes):
            rows.append(
                {
                    "": sweep.name,
                    size_name: str(size),
                    "best LR": f"2^{sweep.exponents[sweep.best[i]]:g}",
                    "by parabola (log2)": str(sweep.optimum(i)),
                    "loss there": f"{sweep.loss[i, sweep.best[i]].mean():.4f}",
                    f"with LR of {sweep.sizes[0]}": f"{sweep.loss[i, sweep.transferred].mean():.4f}",
                    "regret (nats)": f"{sweep.regret(i).mean:.4f}",
                }
            )
    lines = [f"{'ok  ' if finding.passed else 'FAIL'} {finding.name}: {finding.reason}" for finding in verdict.findings]
    return "\n".join(["", table(rows), "", *lines, *(f"note {note}" for note in verdict.notes), "", str(verdict)])


@contextmanager
def _signals(message: Callable[[], str]) -> Iterator[None]:
    """SIGINT and SIGTERM end the block with `Interrupted`."""

    def receive(signum: int, frame: Any) -> None:
        raise Interrupted(signum, message())

    previous = {signum: signal.signal(signum, receive) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def search(
    settings: Settings,
    space: Space,
    grid: Grid,
    n: int,
    folder: Path,
    *,
    n_jobs: int = 1,
    shard: tuple[int, int] = (1, 1),
    loggers: Sequence[Logger] = (),
) -> Verdict | None:
    """Draws `n` sets of constants at the smallest width, writes the best to `best.yaml`, runs it at every width.

    Args:
        settings: of a run; the draws change them.
        space: what is drawn.
        grid: its widths and seeds; its learning rates are the control's alone.
        n: number of draws.
        folder: as of `transfer`; the draws go to `search.csv`.
        n_jobs: processes side by side.
        shard: (i, n), as of `transfer`; it splits the draws, then the finalists, then the grid, each once all of what
            comes before are there: with shards the command is given again after each.
        loggers: as of `transfer`.
    Returns:
        The verdict; None while points of other shards are missing.
    """
    width, seeds = grid.widths[0], list(grid.seeds)
    draws = search_points(settings, space, n, width, seeds[0])
    results = run_points(draws, folder, "search.csv", n_jobs=n_jobs, shard=shard)
    if len(results) < n:
        print(f"{len(results)} of {n} draws are in {folder}: the best is known when all are there")
        return None
    last = finalists(draws, [results[point.key].final_loss() for point in draws], settings, seeds)
    results |= run_points(last, folder, "finalists.csv", n_jobs=n_jobs, shard=shard)
    if any(point.key not in results for point in last):
        print(f"finalists of other shards are missing in {folder}: the best is known when all are there")
        return None
    means = [
        sum(results[point.key].final_loss() for point in last[i : i + len(seeds)]) / len(seeds)
        for i in range(0, len(last), len(seeds))
    ]
    if math.isinf(min(means)):
        raise CheckFailed(f"every draw diverged, see {folder / 'search.csv'}: lower the bounds of search_space")
    best = constants(last[means.index(min(means)) * len(seeds)])
    remark = f"best of {n} draws at d_model {width}: {min(means):.4f} nats a token, {len(seeds)} seeds, longer runs"
    write_best(best, folder / "best.yaml", remark)
    print(f"{remark}; written to {folder / 'best.yaml'}")
    exponent = math.log2(best.pop(LEARNING_RATE))
    tuned = replace(grid, log2_learning_rates=[exponent], control=None)
    points = tuned.points(changed(settings, best))
    control = [point for point in grid.points(settings) if grid.control and point.variant == grid.control[0]]
    results = run_points([*points, *control], folder, "transfer.csv", n_jobs=n_jobs, shard=shard)
    if any(point.key not in results for point in (*points, *control)):
        print(f"points of other shards are missing in {folder}: the verdict needs all")
        return None
    found = sweeps([(point, results[point.key]) for point in (*points, *control)], grid.size_key)
    warmup_steps = settings["model"]["schedule"]["warmup_steps"]
    n_runs = len({point.key for point in (*draws, *last)})
    verdict = judge_search(found, size_name=grid.size_name, n_runs=n_runs, warmup_steps=warmup_steps)
    _finish(found, verdict, grid.size_name, folder, settings, loggers)
    return verdict
