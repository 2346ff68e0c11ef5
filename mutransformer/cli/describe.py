"""`mutransformer describe`: the plan as a table, JSON or CSV."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from typing import Any

from mutransformer.mup.plan import Plan, PlanRow

# column of the table -> how its value reads
_COLUMNS = {
    "name": str,
    "role": str,
    "shape": lambda shape: "x".join(map(str, shape)),
    "axes": lambda axes: ",".join(axes),
    "fan_in": str,
    "fan_out": str,
    "width_multiple": "{:g}".format,
    "init_std": "{:.4g}".format,
    "forward_multiplier": "{:.4g}".format,
    "lr": "{:.4g}".format,
    "weight_decay": "{:.4g}".format,
    "decay_per_step": "{:.4g}".format,
    "eps": "{:.3g}".format,
    "count": "{:,}".format,
}


def row_values(row: PlanRow) -> dict[str, Any]:
    """A row as plain values, its count included."""
    return {**dataclasses.asdict(row), "count": row.count}


def totals(plan: Plan) -> dict[str, Any]:
    """What belongs to the whole model: counts, and the scalars of the forward pass."""
    outside = sum(row.count for row in plan.rows if row.name in ("embedding", "unembedding"))
    return {
        "count": plan.count,
        "count_non_embedding": plan.count - outside,
        "bytes_float32": 4 * plan.count,
        "logits_multiplier": plan.logits_multiplier,
        "residual_multiplier": plan.residual_multiplier,
        "qk_scale": plan.qk_scale,
    }


def print_plan(plan: Plan, format: str) -> None:
    """Prints the plan.

    Args:
        plan: rows, totals and warnings.
        format: `table`, `json` (rows, totals, warnings) or `csv` (rows alone).
    """
    rows = [row_values(row) for row in plan.rows]
    if format == "json":
        print(json.dumps({"rows": rows, "totals": totals(plan), "warnings": plan.warnings}, indent=2))
    elif format == "csv":
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        texts = {"shape": _COLUMNS["shape"], "axes": _COLUMNS["axes"]}
        writer.writerows({key: texts.get(key, lambda v: v)(value) for key, value in row.items()} for row in rows)
    else:
        _print_table(rows)
        whole = totals(plan)
        print(
            f"\n{plan.count:,} parameters ({whole['count_non_embedding']:,} without embedding and unembedding), "
            f"{whole['bytes_float32'] / 2**30:.3g} GiB in float32\n"
            f"logits x {plan.logits_multiplier:g}, residual branches x {plan.residual_multiplier:g}, "
            f"attention scores x {plan.qk_scale:g}"
        )
        for warning in plan.warnings:
            print(f"warning: {warning}")


def _print_table(rows: list[dict[str, Any]]) -> None:
    cells = [list(_COLUMNS), *([show(row[name]) for name, show in _COLUMNS.items()] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_COLUMNS))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
