"""The pictures of the checks. Curves differ by marker and line style too, so that they read in black and white."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mutransformer.verify.coordinates import Row, Series
from mutransformer.verify.transfer import Sweep

MARKERS = "osD^vP*X<>"
LINES = ("-", "--", "-.", ":")


def _style(i: int, n: int) -> dict[str, Any]:
    """Light to dark with size, and a marker and line of its own."""
    from matplotlib import colormaps

    colour = colormaps["viridis"](0.85 - 0.85 * i / max(1, n - 1))
    return {"color": colour, "marker": MARKERS[i % len(MARKERS)], "linestyle": LINES[i % len(LINES)], "markersize": 5}


def _panels(n: int, height: float = 4.2) -> tuple[Figure, Sequence[Any]]:
    figure = Figure(figsize=(5 * n, height), layout="constrained")
    return figure, figure.subplots(1, n, sharey=True, squeeze=False)[0]


def plot_transfer(sweeps: Sequence[Sweep], size_name: str, target: Path) -> None:
    """Loss against log2 learning rate, a curve a size, a panel a sweep; the lowest point of each ringed."""
    figure, panels = _panels(len(sweeps))
    for panel, sweep in zip(panels, sweeps, strict=True):
        for i, size in enumerate(sweep.sizes):
            loss = sweep.loss[i].mean(1)
            shown = np.where(np.isfinite(loss), loss, np.nan)
            panel.plot(sweep.exponents, shown, label=f"{size_name} {size}", **_style(i, len(sweep.sizes)))
            if np.isfinite(loss[sweep.best[i]]):
                panel.plot(sweep.exponents[sweep.best[i]], loss[sweep.best[i]], "o", ms=13, mfc="none", mec="black")
        panel.set(title=sweep.name, xlabel="log2 learning rate")
        panel.grid(alpha=0.3)
        panel.legend()
    lowest = min(sweep.loss.min() for sweep in sweeps)
    worst_best = max(sweep.loss[i, sweep.best[i]].mean() for sweep in sweeps for i in range(len(sweep.sizes)))
    panels[0].set(
        ylabel="final training loss (nats a token)", ylim=(lowest - 0.02, lowest + 4 * (worst_best - lowest) + 0.1)
    )
    figure.savefig(target, dpi=120)


def plot_wider(sweeps: Sequence[Sweep], size_name: str, target: Path) -> None:
    """Training curves at the smallest size's best learning rate, a curve a size, a panel a sweep."""
    figure, panels = _panels(len(sweeps))
    for panel, sweep in zip(panels, sweeps, strict=True):
        for i, size in enumerate(sweep.sizes):
            runs = sweep.curves[i][sweep.transferred]
            curve = np.mean([run[: min(map(len, runs))] for run in runs], axis=0)
            if not len(curve):  # diverged at the first step
                continue
            window = max(1, len(curve) // 20)
            smooth = np.convolve(curve, np.ones(window) / window, "valid")
            steps = np.arange(window, len(curve) + 1)
            style = {**_style(i, len(sweep.sizes)), "markevery": max(1, len(smooth) // 8)}
            panel.plot(steps, smooth, label=f"{size_name} {size}", **style)
        panel.set(
            title=f"{sweep.name}, learning rate 2^{sweep.exponents[sweep.transferred]:g}", xlabel="optimizer step"
        )
        panel.grid(alpha=0.3, which="both")
        panel.legend()
    panels[0].set(ylabel="training loss (nats a token, moving mean)", yscale="log")
    figure.savefig(target, dpi=120)


def plot_coordinates(rows: Sequence[Row], found: Sequence[Series], target: Path) -> None:
    """Mean absolute value against width: steps side by side, a curve a tensor, the first variant above its control.

    Activations alone, mean over seeds and layers; a tensor that fails at that step is drawn thick and named.
    """
    variants = list(dict.fromkeys(row.variant for row in rows))
    values: dict[tuple[str, int, str, int], list[float]] = {}
    for row in rows:
        if row.at.quantity == "activation" and row.at.norm == "mean":
            values.setdefault((row.variant, row.at.step, row.at.tensor, row.width), []).append(row.at.value)
    steps = _spread(sorted({step for _, step, _, _ in values}), 5)
    tensors = list(dict.fromkeys(tensor for _, _, tensor, _ in values))
    widths = sorted({width for *_, width in values})
    failing = {(s.variant, s.step, s.tensor) for s in found if s.quantity in ("activation", "change") and not s.passed}
    figure = Figure(figsize=(3.2 * len(steps) + 2.5, 3.4 * len(variants)), layout="constrained")
    panels = figure.subplots(len(variants), len(steps), sharex=True, sharey=True, squeeze=False)
    for line, variant in zip(panels, variants, strict=True):
        for panel, step in zip(line, steps, strict=True):
            for i, tensor in enumerate(tensors):
                curve = [float(np.mean(values.get((variant, step, tensor, width), np.nan))) for width in widths]
                thick = 2.5 if (variant, step, tensor) in failing else 0.9
                panel.plot(widths, curve, linewidth=thick, label=tensor, **_style(i, len(tensors)))
            n_failing = len({name for v, s, name in failing if (v, s) == (variant, step)})
            panel.set(title=f"{variant}, step {step}: {n_failing or 'no'} tensors off", xscale="log", yscale="log")
            panel.set_xticks(widths, [str(width) for width in widths], minor=False)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        line[0].set_ylabel("mean |x|")
    for panel in panels[-1]:
        panel.set_xlabel("width")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(target, dpi=120)


def _spread(values: Sequence[int], n: int) -> list[int]:
    """At most `n` of the values, the first and the last among them."""
    return [values[round(i)] for i in np.linspace(0, len(values) - 1, min(n, len(values)))]
