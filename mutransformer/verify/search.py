"""Random search on the smallest model: good constants found there, then shown at the wider ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mutransformer.errors import ConfigError
from mutransformer.verify.points import Point, write_whole
from mutransformer.verify.settings import LEARNING_RATE, SEED, WIDTH, Settings, changed, value_at

N_FINALISTS = 8
FINALISTS_TIMES_STEPS = 4  # a wider model is further on its way after as many steps: the choice is made further on

DEFAULT_SPACE: dict[str, list[float]] = {
    "model.optimizer.learning_rate": [0.004, 0.125],
    "model.parametrization.input_multiplier": [0.5, 4.0],
    "model.parametrization.output_multiplier": [0.5, 16.0],
    "model.parametrization.qk_scale": [0.03, 1.0],
    "model.parametrization.lr_multiplier.embedding": [1.0, 16.0],
}


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched: dotted key -> (lowest, highest), drawn log-uniformly and rounded to three digits.

    Raises:
        ConfigError: bounds that are not above zero and in order.
    """

    bounds: Mapping[str, Sequence[float]]

    def __post_init__(self) -> None:
        for key, bounds in self.bounds.items():
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
                rule = "must be two numbers above zero, the lower first"
                raise ConfigError(f"search_space.{key}", bounds, rule, "write [0.25, 4]")
        if LEARNING_RATE not in self.bounds:
            rule = f"leaves out {LEARNING_RATE}, without which no other constant can be judged"
            raise ConfigError("search_space", list(self.bounds), rule, "add it")

    def draw(self, seed: int, i: int) -> dict[str, float]:
        """Draw number `i`: the same in every process, whatever else was drawn."""
        random = np.random.default_rng([seed, i])
        return {
            key: float(f"{np.exp(random.uniform(np.log(low), np.log(high))):.3g}")
            for key, (low, high) in self.bounds.items()
        }


def search_points(settings: Settings, space: Space, n: int, width: int, seed: int) -> list[Point]:
    """`n` draws at one width with one seed."""
    return [_point(settings, space.draw(settings[SEED], i), width, seed) for i in range(n)]


def finalists(
    points: Sequence[Point], losses: Sequence[float], settings: Settings, seeds: Sequence[int]
) -> list[Point]:
    """The best draws again, with every seed and longer: what one seed and a short run rank first is partly luck."""
    longer = {
        key: FINALISTS_TIMES_STEPS * value_at(settings, key)
        for key in ("trainer.max_steps", "model.schedule.warmup_steps")
    }
    settings = changed(settings, longer)
    order = np.argsort(losses, kind="stable")[:N_FINALISTS]
    return [_point(settings, constants(points[i]), points[i].changes[WIDTH], seed) for i in order for seed in seeds]


def constants(point: Point) -> dict[str, Any]:
    """What was drawn for a point."""
    return {key: value for key, value in point.changes.items() if key not in (WIDTH, SEED)}


def write_best(best: Mapping[str, Any], path: Path, remark: str) -> None:
    """Writes constants as a config to be laid over another."""
    tree: dict[str, Any] = {}
    for key, value in best.items():
        *parents, last = key.split(".")
        branch = tree
        for part in parents:
            branch = branch.setdefault(part, {})
        branch[last] = value
    write_whole(path, f"# {remark}\n{yaml.safe_dump(tree, sort_keys=False)}")


def _point(settings: Settings, drawn: Mapping[str, Any], width: int, seed: int) -> Point:
    changes = {WIDTH: width, **drawn, SEED: seed}
    return Point(variant="search", changes=changes, settings=changed(settings, changes))
