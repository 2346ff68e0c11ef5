"""The pictures of the checks. Curves differ by marker and line style as well as by colour: they read in black and white."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

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
            panel.plot(sweep.exponents[sweep.best[i]], loss[sweep.best[i]], "o", ms=13, mfc="none", mec="black")
        panel.set(title=sweep.name, xlabel="log2 learning rate")
        panel.grid(alpha=0.3)
        panel.legend()
    lowest = min(sweep.loss.min() for sweep in sweeps)
    worst_best = max(sweep.loss[i, sweep.best[i]].mean() for sweep in sweeps for i in range(len(sweep.sizes)))
    panels[0].set(ylabel="final training loss (nats a token)", ylim=(lowest - 0.02, lowest + 4 * (worst_best - lowest) + 0.1))
    figure.savefig(target, dpi=120)


def plot_wider(sweeps: Sequence[Sweep], size_name: str, target: Path) -> None:
    """Training curves at the smallest size's best learning rate, a curve a size, a panel a sweep."""
    figure, panels = _panels(len(sweeps))
    for panel, sweep in zip(panels, sweeps, strict=True):
        for i, size in enumerate(sweep.sizes):
            runs = sweep.curves[i][sweep.transferred]
            curve = np.mean([run[: min(map(len, runs))] for run in runs], axis=0)
            window = max(1, len(curve) // 20)
            smooth = np.convolve(curve, np.ones(window) / window, "valid")
            steps = np.arange(window, len(curve) + 1)
            style = {**_style(i, len(sweep.sizes)), "markevery": max(1, len(smooth) // 8)}
            panel.plot(steps, smooth, label=f"{size_name} {size}", **style)
        panel.set(title=f"{sweep.name}, learning rate 2^{sweep.exponents[sweep.transferred]:g}", xlabel="optimizer step")
        panel.grid(alpha=0.3, which="both")
        panel.legend()
    panels[0].set(ylabel="training loss (nats a token, moving mean)", yscale="log")
    figure.savefig(target, dpi=120)
