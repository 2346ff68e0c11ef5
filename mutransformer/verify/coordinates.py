"""The judge of the coordinate check: how does the size of every tensor depend on width? No training here.

In muP every activation, and every change of it by training, keeps its size as width grows; so do a weight's
initialization and updates, up to a power of its fan-in that is known. A wrong rule shows as another power of width: by
1/2 or more, since all rules are powers of sqrt(width). So what lies within half of that, TOLERANCE, is as it should be.

Source:
    Tensor Programs IV (arXiv 2011.14522) and V (arXiv 2203.03466, App. D.1); docs/proof.md has the argument in full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from mutransformer.mup.roles import TENSORS, Kind
from mutransformer.verify.record import Coordinate
from mutransformer.verify.verdict import Estimate, Finding, Verdict, slope

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
