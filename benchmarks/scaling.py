"""How a step's time and memory grow with width, depth, length and vocabulary, against the formulas.

    python benchmarks/scaling.py [--precision fp32] [--rounds 3] [--plot docs/images/scaling.png] [--json FILE]

One dimension at a time is changed from a base shape, with the same number of tokens in a step. Two fits over all
points, by least squares of relative errors:

    seconds = FLOPs / rate + bytes / bandwidth + overhead * n_layer + fixed      (training.throughput.flops_per_token)
    peak bytes = factor * bytes + fixed                                          (training.throughput.bytes_held)

A point that takes a quarter more than its fit is flagged: there something grows faster than the formulas say.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speed import Shape, Worker

from mutransformer import DecoderConfig, OptimizerConfig, ParametrizationConfig
from mutransformer.training.throughput import bytes_held, flops_per_token

N_TOKENS = 2048
BASE = {"d_model": 128, "n_layer": 4, "sequence_len": 256, "vocab_size": 512}
SWEEPS = {
    "d_model": (64, 128, 256, 512, 1024),
    "n_layer": (2, 4, 8, 16, 32),
    "sequence_len": (128, 256, 512, 1024, 2048),
    "vocab_size": (256, 2048, 16_384, 131_072),
}
FLAGGED = 1.25


def measure(name: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """One point: medians of a process of its own, and what the formulas say."""
    changed = {**BASE, name: size}
    shape = Shape(n_rows=N_TOKENS // changed["sequence_len"], **changed)
    worker = Worker("eager", shape, options.precision == "bf16", options)
    for _ in range(options.rounds):
        worker.run(options.steps)
    result = worker.result()
    config = DecoderConfig(**changed, d_head=shape.d_head, activation=options.activation)
    plan = config.plan(ParametrizationConfig(), OptimizerConfig())
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    return {
        "changed": name,
        "size": size,
        "n_layer": changed["n_layer"],
        "step_s": float(np.median(result["step_s"])),
        "cpu_s": result["cpu_s_per_step"],
        "peak_bytes": result["peak_mb"] * 2**20,
        "flops": flops_per_token(config, plan) * N_TOKENS,
        "bytes": bytes_held(config, plan, N_TOKENS, dtype),
    }


def fit(points: list[dict[str, Any]], target: str, terms: tuple[str, ...]) -> dict[str, float]:
    """Coefficients, none below zero, of `target` as a sum of terms and a constant; adds each point's `TARGET_ratio`."""
    measured = np.array([p[target] for p in points])
    columns = {term: np.array([p[term] for p in points]) for term in terms} | {"fixed": np.ones(len(points))}
    while True:
        matrix = np.stack(list(columns.values()), 1) / measured[:, None]
        found = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)[0]
        if (found >= 0).all():
            break
        columns.pop(list(columns)[int(found.argmin())])
    for point, ratio in zip(points, 1 / (matrix @ found), strict=True):
        point[f"{target}_ratio"] = float(ratio)
    return dict(zip(columns, map(float, found), strict=True))


def table(points: list[dict[str, Any]]) -> str:
    """A line a point."""
    lines = [f"{'':22} {'step s':>8} {'to fit':>7} {'CPU s':>8} {'peak MB':>8} {'to fit':>7} {'GFLOP/s':>8}"]
    for p in points:
        flag = "  more than linear" if max(p["cpu_s_ratio"], p["peak_bytes_ratio"]) > FLAGGED else ""
        lines.append(
            f"{p['changed']:13}{p['size']:9,} {p['step_s']:8.3f} {p['cpu_s_ratio']:7.2f} {p['cpu_s']:8.3f} "
            f"{p['peak_bytes'] / 2**20:8,.0f} {p['peak_bytes_ratio']:7.2f} {p['flops'] / p['cpu_s'] / 1e9:8.0f}{flag}"
        )
    return "\n".join(lines)


def plot(points: list[dict[str, Any]], target: Path) -> None:
    """Measured points and the fits, a column a sweep: CPU seconds above, memory below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 6.5), layout="constrained")
    panels = figure.subplots(2, len(SWEEPS), sharey="row")
    for column, name in enumerate(SWEEPS):
        chosen = [p for p in points if p["changed"] == name]
        sizes = [p["size"] for p in chosen]
        for row, (key, unit) in enumerate({"cpu_s": 1.0, "peak_bytes": 2.0**20}.items()):
            panel = panels[row][column]
            panel.plot(sizes, [p[key] / unit for p in chosen], "ko", label="measured")
            panel.plot(
                sizes, [p[key] / p[f"{key}_ratio"] / unit for p in chosen], "--", color="gray", label="formula, fitted"
            )
            panel.set(xscale="log", yscale="log", xlabel=name)
            panel.set_xscale("log", base=2)
            panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("CPU seconds a step")
    panels[1][0].set_ylabel("peak memory of the process (MB)")
    panels[0][0].legend()
    figure.savefig(target, dpi=110)


def main() -> None:
    """Measures all points, fits, prints and plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--activation", choices=("swiglu", "relu"), default="relu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps a round")
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parser.set_defaults(device="cpu")
    options = parser.parse_args()
    points = [measure(name, size, options) for name, sizes in SWEEPS.items() for size in sizes]
    time_fit = fit(points, "cpu_s", ("flops", "bytes", "n_layer"))
    memory_fit = fit(points, "peak_bytes", ("bytes",))
    print(table(points))
    print("CPU seconds =", " + ".join(f"{value:.3g} {name}" for name, value in time_fit.items()))
    print("peak bytes =", " + ".join(f"{value:.3g} {name}" for name, value in memory_fit.items()))
    if options.plot:
        plot(points, options.plot)
    if options.json:
        options.json.write_text(json.dumps({"points": points, "cpu_s": time_fit, "peak_bytes": memory_fit}, indent=1))


if __name__ == "__main__":
    main()
