"""The transfer study: does the best learning rate of a small model stay the best as it grows, and is it worth it?

A grid of short runs over learning rate, size and seed, for the parametrization asked for and for a control; then the
verdict, all of it computed from the stored curves.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mutransformer.errors import ConfigError
from mutransformer.verify.points import Point, Result
from mutransformer.verify.settings import DEPTH, LEARNING_RATE, SEED, WIDTH, Settings, changed, check_seeds, value_at
from mutransformer.verify.verdict import Estimate, Finding, Verdict, parabola_minimum

MAX_DRIFT_OCTAVES = 1.0
MAX_REGRET_SHARE = 0.1
N_ERRORS = 3
NOT_TUNED = "; its best learning rate lies at the grid's edge, so it is not tuned: widen the grid"

# what a study varies in any case, directly or by its seed
OWN_KEYS = (WIDTH, LEARNING_RATE, SEED, "data.shuffle_seed")

# settings that must stay as they are for hyperparameters to transfer -> what they are called
FIXED: Mapping[str, str] = {
    DEPTH: "depth",
    "model.decoder.d_head": "head width",
    "model.decoder.ff_multiple": "ff_multiple",
    "data.tokens_per_batch": "batch",
    "data.sequence_len": "sequence length",
    "data.tokenizer": "tokenizer",
    "trainer.max_steps": "number of steps",
    "model.schedule.warmup_steps": "warm-up",
}


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What a study varies.

    Args:
        widths: d_model.
        log2_learning_rates: exponents of two, equally spaced, ascending.
        seeds: of initialization and order of the data.
        axis: one more dotted key and its values.
        control: name and settings of what the study is compared with; None: nothing.
    Raises:
        ConfigError: values that are missing, repeated, or out of order.
    """

    widths: Sequence[int]
    log2_learning_rates: Sequence[float]
    seeds: Sequence[int]
    axis: tuple[str, Sequence[Any]] | None = None
    control: tuple[str, Settings] | None = None

    def __post_init__(self) -> None:
        steps = np.diff(self.log2_learning_rates)
        if self.axis and self.axis[0] in OWN_KEYS:
            raise ConfigError("axis", self.axis[0], "is what a study varies anyway", "use its own option")
        if not len(self.log2_learning_rates) or (steps <= 0).any() or not np.allclose(steps, steps[:1]):
            rule = "must be equally spaced and ascending"
            raise ConfigError("log2_learning_rates", list(self.log2_learning_rates), rule, "write [-9,-8,-7,-6]")
        if not all(abs(exponent) <= 100 for exponent in self.log2_learning_rates):
            rule = "are exponents of two, from -100 to 100"
            raise ConfigError("log2_learning_rates", list(self.log2_learning_rates), rule, "write [-9,-8,-7,-6]")
        check_seeds(self.seeds)
        others = dict([self.axis]) if self.axis else {}
        for name, values in {"widths": self.widths, **others}.items():
            if not values or len(set(values)) < len(values):
                raise ConfigError(name, list(values), "must be one or more values, each once", "leave out the repeated")
        if self.size_key == WIDTH and (len(self.widths) < 2 or sorted(self.widths) != list(self.widths)):
            rule = "must be two or more, ascending: transfer is from the first to the others"
            raise ConfigError("widths", list(self.widths), rule, "use 32,64,128")

    @property
    def size_key(self) -> str:
        """What grows: depth where it is the axis, else width."""
        return DEPTH if self.axis and self.axis[0] == DEPTH else WIDTH

    @property
    def size_name(self) -> str:
        """`d_model` or `n_layer`."""
        return self.size_key.rpartition(".")[2]

    def points(self, settings: Settings) -> list[Point]:
        """Every run of the study: the largest models first, so that no worker is left with one at the end."""
        main = settings["model"]["parametrization"]["rules"]
        if self.control and self.control[0] == main:
            raise ConfigError("compare", main, "is what the config runs itself", "use null, or other rules")
        variants = [(main, settings), *([self.control] if self.control else [])]
        found = [point for variant, base in variants for point in self._of(variant, base)]
        if len({point.key for point in found}) < len(found):
            field, value = ("axis", self.axis[0]) if self.axis else ("compare", self.control and self.control[0])
            raise ConfigError(field, value, "changes nothing that a run computes", "name a setting that does")
        return sorted(found, key=lambda point: -point.changes[WIDTH] * point.changes.get(DEPTH, 1))

    def _of(self, variant: str, base: Settings) -> list[Point]:
        axis_key, axis_values = self.axis or (None, (None,))
        return [
            Point(
                variant=variant,
                changes=(
                    changes := {
                        WIDTH: width,
                        **({axis_key: value} if axis_key else {}),
                        LEARNING_RATE: float(f"{2.0**exponent:.15g}"),  # as a decimal in a config would be
                        SEED: seed,
                    }
                ),
                settings=changed(base, changes),
            )
            for width, value, exponent, seed in itertools.product(
                self.widths, axis_values, self.log2_learning_rates, self.seeds
            )
        ]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The runs of one variant that differ in size, learning rate and seed alone, as arrays.

    Args:
        variant: parametrization, or the control's name.
        others: the remaining changes, equal in all its runs.
        sizes: ascending.
        exponents: log2 of the learning rates, ascending.
        loss: [size, learning rate, seed] final loss in nats a token; infinite where a run diverged or failed.
        curves: [size][learning rate][seed] training loss of each step.
        seconds: [size, learning rate, seed] wall time.
    """

    variant: str
    others: Mapping[str, Any]
    sizes: Sequence[float]
    exponents: Sequence[float]
    loss: np.ndarray
    curves: Sequence[Sequence[Sequence[np.ndarray]]]
    seconds: np.ndarray

    @property
    def name(self) -> str:
        """The variant, and what is particular to these runs."""
        return " ".join([self.variant, *(f"{key.rpartition('.')[2]}={value}" for key, value in self.others.items())])

    @property
    def best(self) -> np.ndarray:
        """[size] index of the learning rate with the lowest loss, mean over seeds."""
        return self.loss.mean(2).argmin(1)

    @property
    def transferred(self) -> int:
        """Index of the learning rate that is best at the smallest size."""
        return int(self.best[0])

    def is_at_edge(self, i: int) -> bool:
        """Whether the best learning rate at size number `i` is the grid's first or last: it may lie outside."""
        return int(self.best[i]) in (0, len(self.exponents) - 1)

    def optimum(self, i: int) -> Estimate:
        """log2 of the best learning rate at size number `i`, by a parabola for each seed."""
        return Estimate.over_seeds([parabola_minimum(self.exponents, losses) for losses in self.loss[i].T])

    def drift(self) -> Estimate:
        """Octaves that the best learning rate moves from the smallest size to the largest, by a straight line."""
        doublings = np.log2(np.asarray(self.sizes) / self.sizes[0])
        optima = [[parabola_minimum(self.exponents, self.loss[i, :, s]) for i in range(len(self.sizes))]
                  for s in range(self.loss.shape[2])]  # fmt: skip
        return Estimate.over_seeds([float(np.polyfit(doublings, of, 1)[0] * doublings[-1]) for of in optima])

    def regret(self, i: int) -> Estimate:
        """Nats a token lost at size number `i` with the smallest size's learning rate instead of its own best."""
        return difference(self.loss[i, self.transferred], self.loss[i, self.best[i]])

    def gain(self) -> float:
        """Nats a token that the largest size is better than the smallest, each at its best."""
        lowest = self.loss.mean(2).min(1)
        return float(lowest[0] - lowest[-1])


def difference(ours: np.ndarray, theirs: np.ndarray) -> Estimate:
    """Of losses that are paired by seed; infinite where one is."""
    for losses, sign in ((ours, math.inf), (theirs, -math.inf)):
        if not np.isfinite(losses).all():
            return Estimate(sign, sign, sign)
    return Estimate.over_seeds(list(ours - theirs))


def sweeps(results: Sequence[tuple[Point, Result]], size_key: str) -> list[Sweep]:
    """Sorts a study's results into sweeps, those of its own variant first.

    Args:
        results: of every point of a grid.
        size_key: `WIDTH` or `DEPTH`.
    """
    groups: dict[tuple[Any, ...], dict[tuple[float, float, int], Result]] = {}
    for point, result in results:
        others = tuple((k, v) for k, v in point.changes.items() if k not in (size_key, LEARNING_RATE, SEED))
        at = (point.changes[size_key], math.log2(point.changes[LEARNING_RATE]), point.changes[SEED])
        groups.setdefault((point.variant, others), {})[at] = result
    found = []
    for (variant, others), group in groups.items():
        sizes, exponents, seeds = (sorted(set(values)) for values in zip(*group, strict=True))
        grid = [[[group[size, exponent, seed] for seed in seeds] for exponent in exponents] for size in sizes]
        found.append(
            Sweep(
                variant=variant,
                others=dict(others),
                sizes=sizes,
                exponents=exponents,
                loss=np.array([[[r.final_loss() for r in row] for row in plane] for plane in grid]),
                curves=[[[r.losses for r in row] for row in plane] for plane in grid],
                seconds=np.array([[[r.seconds for r in row] for row in plane] for plane in grid]),
            )
        )
    return found


def first_step_not_better(narrow: Sequence[np.ndarray], wide: Sequence[np.ndarray], start: int) -> int | None:
    """First step from which on a moving mean says that the wider model is behind.

    The runs are paired by seed and see the same batches. The difference of their losses is averaged over seeds and over
    a twentieth of the run at a time; the wider model is behind where that mean is above N_ERRORS of its standard error.

    Args:
        narrow: losses of the smaller model, an array a seed.
        wide: those of the larger.
        start: steps of warm-up, which do not count.
    Returns:
        The last step of the first such part of the run, from 1; the step at which a wider run alone diverged; None
        where there is none.
    """
    n_narrow, n_wide = min(map(len, narrow)), min(map(len, wide))
    n_steps = min(n_narrow, n_wide)
    behind = np.mean([w[:n_steps] - n[:n_steps] for n, w in zip(narrow, wide, strict=True)], axis=0)[start:]
    window = max(4, n_steps // 20)
    for i in range(0, len(behind) - window + 1, window):
        part = behind[i : i + window]
        if part.mean() > N_ERRORS * part.std(ddof=1) / math.sqrt(window):
            return start + i + window
    return n_wide + 1 if n_wide < n_narrow else None


def _control_of(ours: Sweep, found: Sequence[Sweep]) -> Sweep | None:
    """The control's sweep that differs from `ours` in nothing else."""
    return next((s for s in found if s.variant != ours.variant and s.others == ours.others), None)


def judge_transfer(found: Sequence[Sweep], *, size_name: str, warmup_steps: int, notes: Sequence[str] = ()) -> Verdict:
    """The verdict of a study: on each sweep of its own variant, and on the control, which must fail drift or regret.

    A sweep passes where its best learning rate stays within MAX_DRIFT_OCTAVES from the smallest size to the largest
    (the grid's resolution); where using the smallest's at the largest costs at most MAX_REGRET_SHARE of what growing
    gains; and where a larger model is never behind a smaller one at that learning rate.

    Args:
        found: own variant first.
        size_name: what grows, as in `d_model`.
        warmup_steps: steps that "wider is better" leaves out.
        notes: warnings to be kept with the verdict.
    """
    main = found[0].variant
    findings: list[Finding] = []
    for sweep in found:
        mine = _findings(sweep, size_name, warmup_steps)
        if sweep.variant == main:
            findings += mine.values()
        else:
            failed = [mine[name] for name in ("drift", "regret") if not mine[name].passed]
            reason = failed[0].reason if failed else "it transfers too: this study cannot tell them apart"
            findings.append(Finding(name=f"control {sweep.name} fails", passed=bool(failed), reason=reason))
    pairs = [(ours, control) for ours in found if ours.variant == main if (control := _control_of(ours, found))]
    return Verdict(
        check="transfer",
        findings=findings,
        notes=[*notes, *(worth(ours, control) for ours, control in pairs)],
        figures={"sweeps": [figures(sweep, size_name) for sweep in found]},
    )


def judge_search(found: Sequence[Sweep], *, size_name: str, n_runs: int, warmup_steps: int) -> Verdict:
    """The verdict of a search: what was tuned at the smallest size is better the wider, and no worse than the control.

    Args:
        found: own variant, with its one learning rate, and then the control's, if there is one.
        size_name: what grows.
        n_runs: small runs that the search took.
        warmup_steps: steps that "wider is better" leaves out.
    """
    ours, controls = found[0], found[1:]
    findings = [_larger_is_better(ours, size_name, warmup_steps)]
    for control in controls:
        gap = difference(ours.loss[-1, 0], control.loss[-1, control.best[-1]])
        is_tuned = not control.is_at_edge(-1)
        reason = (
            f"tuned at {size_name} {ours.sizes[0]} by {n_runs} small runs, it reaches "
            f"{ours.loss[-1, 0].mean():.3f} nats at {ours.sizes[-1]}; {control.variant} tuned there by "
            f"{control.loss[-1].size} large runs {control.loss[-1, control.best[-1]].mean():.3f}: a gap of {gap} nats"
            + ("" if is_tuned else NOT_TUNED)
        )
        passed = is_tuned and gap.mean <= 0
        findings.append(Finding(name=f"worth it against {control.variant}", passed=passed, reason=reason))
    return Verdict(
        check="search", findings=findings, figures={"sweeps": [figures(sweep, size_name) for sweep in found]}
    )


def _findings(sweep: Sweep, size_name: str, warmup_steps: int) -> dict[str, Finding]:
    drift, regret, gain = sweep.drift(), sweep.regret(-1), sweep.gain()
    smallest, largest = sweep.sizes[0], sweep.sizes[-1]
    edges = [size for i, size in enumerate(sweep.sizes) if sweep.is_at_edge(i)]
    checks = {
        "grid": (
            not edges,
            f"the best learning rate lies at the grid's edge for {size_name} {', '.join(map(str, edges))}: widen it"
            if edges
            else "every best learning rate lies inside the grid",
        ),
        "drift": (
            abs(drift.mean) <= MAX_DRIFT_OCTAVES,
            f"the best learning rate moves by {drift} octaves from {size_name} {smallest} to {largest}; "
            f"at most {MAX_DRIFT_OCTAVES:g} is asked for",
        ),
        "regret": (
            regret.mean <= MAX_REGRET_SHARE * gain,
            f"the best learning rate of {size_name} {smallest} costs {regret.mean:.3f} nats at {largest}, "
            f"where growing gains {gain:.3f}; at most a {1 / MAX_REGRET_SHARE:g}th is asked for",
        ),
    }
    found = {
        name: Finding(name=f"{sweep.name}: {name}", passed=ok, reason=reason) for name, (ok, reason) in checks.items()
    }
    return {**found, "larger": _larger_is_better(sweep, size_name, warmup_steps)}


def _larger_is_better(sweep: Sweep, size_name: str, warmup_steps: int) -> Finding:
    """Whether each size is at no step behind the next smaller one, at the smallest's best learning rate."""
    curves = [of_size[sweep.transferred] for of_size in sweep.curves]
    behind = [
        f"{sweep.sizes[i + 1]} falls behind {sweep.sizes[i]} at step {step}"
        for i in range(len(curves) - 1)
        if (step := first_step_not_better(curves[i], curves[i + 1], warmup_steps)) is not None
    ]
    reason = "; ".join(behind) or "at every step after the warm-up"
    word = "deeper" if size_name == "n_layer" else "wider"
    return Finding(name=f"{sweep.name}: {word} is better", passed=not behind, reason=reason)


def worth(ours: Sweep, control: Sweep) -> str:
    """What transfer brings: the largest model with the smallest's learning rate, against the control tuned there."""
    reached, tuned = ours.loss[-1, ours.transferred], control.loss[-1, control.best[-1]]
    gap = difference(reached, tuned)
    word = "ahead of" if gap.mean < 0 else "behind"
    n_lr, n_seeds = control.loss.shape[1:]
    ours_s = float(ours.seconds[0].sum() + ours.seconds[-1, ours.transferred].sum())
    control_s = float(control.seconds[-1].sum())
    return (
        f"is it worth it: {ours.name} tuned at {ours.sizes[0]} reaches {reached.mean():.3f} nats at {ours.sizes[-1]}, "
        f"{abs(gap.mean):.3f} {word} {control.variant} tuned there ({tuned.mean():.3f}); "
        f"{ours.loss[0].size} small runs and {n_seeds} large in {ours_s:.0f} s, against "
        f"{n_lr * n_seeds} large runs in {control_s:.0f} s" + (NOT_TUNED if control.is_at_edge(-1) else "")
    )


def figures(sweep: Sweep, size_name: str) -> dict[str, Any]:
    """A sweep's results as plain values."""
    return {
        "variant": sweep.variant,
        "others": dict(sweep.others),
        "log2_learning_rates": list(sweep.exponents),
        "drift_octaves": sweep.drift(),
        "gain_nats": sweep.gain(),
        "sizes": [
            {
                size_name: size,
                "best_log2_learning_rate": sweep.exponents[sweep.best[i]],
                "optimum_log2_learning_rate": sweep.optimum(i),
                "loss_at_best": sweep.loss[i, sweep.best[i]].mean(),
                "loss_at_transferred": sweep.loss[i, sweep.transferred].mean(),
                "regret_nats": sweep.regret(i),
                "mean_loss": sweep.loss[i].mean(1).tolist(),
            }
            for i, size in enumerate(sweep.sizes)
        ],
    }


def fixed_settings_that_vary(points: Sequence[Point]) -> list[str]:
    """Warnings, by name, of what varies between the points of a study and must not for transfer to hold."""
    found = []
    of_data = {f"data.{name}": "data" for name in points[0].settings["data"] if name != "shuffle_seed"}
    for key, name in {**of_data, **FIXED}.items():
        values = {json.dumps(value_at(point.settings, key)) for point in points}
        if len(values) < 2:
            continue
        if key == DEPTH and points[0].settings["model"]["parametrization"]["depth_rule"] != "none":
            continue
        remedy = "; set model.parametrization.depth_rule=completep to transfer over it" if key == DEPTH else ""
        found.append(f"{name} varies ({key}): hyperparameters need not transfer over it{remedy}")
    return found
