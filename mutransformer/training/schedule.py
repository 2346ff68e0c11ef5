"""The schedule s(t): a factor in [0, 1] on every group's peak learning rate, by count of optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from mutransformer.errors import ConfigError, require_finite


@dataclass(kw_only=True)
class ScheduleConfig:
    """Warm-up, then decay; each step counts once, however many micro-batches it has.

    Args:
        kind: after the warm-up: `linear` or `cosine` decay to end_fraction, `wsd` stays at the peak and decays
            linearly over the last decay_steps, `constant` stays.
        warmup_steps: steps from start_fraction to the peak.
        decay_steps: length of the final decay of `wsd`, in steps; null: a tenth of the run.
        start_fraction: factor at the first step of the warm-up.
        end_fraction: factor at the end of the decay, and after it.
        total_steps: length of the run in optimizer steps; linked to trainer.max_steps.
    """

    kind: Literal["linear", "cosine", "wsd", "constant"] = "linear"
    warmup_steps: int = 0
    decay_steps: int | None = None
    start_fraction: float = 1e-4
    end_fraction: float = 1e-4
    total_steps: int = 1000

    def __post_init__(self) -> None:
        section = "model.schedule"
        require_finite(section, self)
        if self.total_steps < 1:
            raise ConfigError(
                "trainer.max_steps", self.total_steps, "the schedule needs the length of the run", "give 1 or more"
            )
        if self.warmup_steps < 0:
            raise ConfigError(f"{section}.warmup_steps", self.warmup_steps, "must not be negative", "use 0")
        if self.warmup_steps >= self.total_steps:
            raise ConfigError(
                f"{section}.warmup_steps",
                self.warmup_steps,
                f"must be less than the run's trainer.max_steps={self.total_steps}",
                f"use {self.total_steps // 10}",
            )
        for name in ("start_fraction", "end_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{section}.{name}", getattr(self, name), "must lie in 0 to 1", "use 1e-4")
        if self.decay_steps is not None and self.kind != "wsd":
            raise ConfigError(
                f"{section}.decay_steps", self.decay_steps, f"is not read by kind {self.kind}", "use kind wsd, or null"
            )
        longest = self.total_steps - self.warmup_steps
        if self.decay_steps is not None and not 1 <= self.decay_steps <= longest:
            raise ConfigError(
                f"{section}.decay_steps",
                self.decay_steps,
                f"must lie in 1 to {longest}, what the warm-up leaves of the run",
                f"use {max(1, longest // 10)}",
            )

    @property
    def wsd_decay_steps(self) -> int:
        """Length of the final decay of `wsd`, resolved."""
        return self.decay_steps or max(1, (self.total_steps - self.warmup_steps) // 10)


def _linear(done: float, end: float) -> float:
    return 1 + (end - 1) * done


def _cosine(done: float, end: float) -> float:
    return (1 - end) * (1 + math.cos(math.pi * done)) / 2 + end


# kind -> (factor by share of the decay that is done, length of the decay)
_DECAYS: Mapping[str, tuple[Callable[[float, float], float], Callable[[ScheduleConfig], int]]] = {
    "linear": (_linear, lambda c: c.total_steps - c.warmup_steps),
    "cosine": (_cosine, lambda c: c.total_steps - c.warmup_steps),
    "wsd": (_linear, lambda c: c.wsd_decay_steps),
    "constant": (lambda done, end: 1.0, lambda c: 1),
}


def schedule_factor(step: int, config: ScheduleConfig) -> float:
    """s(step) for the optimizer step that has `step` steps before it.

    Args:
        step: count of optimizer steps taken, from 0.
        config: kind and lengths.
    Returns:
        Factor on the peak learning rate, 0 to 1.
    Source:
        lucaslingle/mu_transformer (linear, cosine; both ends at 1e-4); arXiv 2404.06395 for wsd.
    """
    if step < config.warmup_steps:
        return config.start_fraction + (1 - config.start_fraction) * step / config.warmup_steps
    decay, length_of = _DECAYS[config.kind]
    length = length_of(config)
    done = (step - (config.total_steps - length)) / length
    return decay(min(max(done, 0.0), 1.0), config.end_fraction)
