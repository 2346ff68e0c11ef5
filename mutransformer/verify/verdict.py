"""What a check concludes: slopes with their intervals, findings with a reason, PASS or FAIL. No torch here."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

# two-sided 95 % quantiles of Student's t by degrees of freedom; above them 1.96 + 2.5 / df is within 0.02
_T95 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval (Student's t); infinitely wide for a single seed."""

    mean: float
    low: float
    high: float

    @classmethod
    def over_seeds(cls, values: Sequence[float] | np.ndarray) -> Estimate:
        """Of one value a seed."""
        n = len(values)
        mean = float(np.mean(values))
        t95 = _T95[n - 1] if n <= len(_T95) else 1.96 + 2.5 / (n - 1)
        half = t95 * float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.inf
        return cls(mean, mean - half, mean + half)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.mean:+.2f}"
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Exponent p of the least-squares fit values ~ sizes^p; both above zero."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def parabola_minimum(x: Sequence[float], y: Sequence[float] | np.ndarray) -> float:
    """Where the parabola through the lowest point and its two neighbours has its minimum.

    Args:
        x: equally spaced, ascending.
        y: one value each; infinite where a run diverged.
    Returns:
        The minimum's x, within the neighbours; the lowest point itself at an end of `x` or beside a diverged run.
    """
    i = int(np.argmin(y))
    if i in (0, len(y) - 1) or not np.isfinite(y[i - 1 : i + 2]).all():
        return float(x[i])
    left, middle, right = y[i - 1 : i + 2]
    curvature = left - 2 * middle + right
    return float(x[i] + (x[i + 1] - x[i]) * (left - right) / (2 * curvature)) if curvature > 0 else float(x[i])


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was checked.

    Args:
        name: what was looked at, e.g. a tensor.
        passed: whether it is as it should be.
        reason: what was seen, what was asked for.
    """

    name: str
    passed: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """PASS or FAIL of a whole check, with the findings it rests on.

    Args:
        check: name of the check.
        findings: all that was looked at; the check passes where each does.
        notes: what a reader should know besides.
        figures: the results as plain values.
    """

    check: str
    findings: Sequence[Finding]
    notes: Sequence[str] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return bool(self.findings) and all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.passed]

    def __str__(self) -> str:
        return f"{self.check}: {'PASS' if self.passed else 'FAIL'}"

    def save(self, path: Path) -> None:
        """Writes everything as JSON; infinite and missing numbers as null."""
        content = {"passed": self.passed, **asdict(self)}
        path.write_text(json.dumps(_plain(content), indent=1) + "\n")


def _plain(value: Any) -> Any:
    """JSON has no infinity: null; numpy scalars and tuples as Python's own."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of equal keys as aligned columns, the keys as heads."""
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )
