"""A trace of a few steps, to be looked at in Perfetto."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from mutransformer.errors import ConfigError


class ProfileSteps(Callback):
    """Writes what the devices do in some steps to `trace_FIRST_LAST.json.gz` in the run folder, for ui.perfetto.dev.

    Args:
        steps: "first:last", optimizer steps counted from 1, both included.
        max_steps: those of the run.
    Raises:
        ConfigError: not of this form, or not steps of the run.
    """

    def __init__(self, steps: str, max_steps: int) -> None:
        first, colon, last = steps.partition(":")
        if not (colon and first.isdigit() and last.isdigit()):
            raise ConfigError("profile_steps", steps, "is not of the form first:last", "write 10:20")
        self.first, self.last = int(first), int(last)
        if not 1 <= self.first <= self.last:
            raise ConfigError(
                "profile_steps", steps, "must begin at 1 or later and not end before it begins", "use 10:20"
            )
        if self.last > max_steps:
            rule = f"the run has trainer.max_steps={max_steps}"
            raise ConfigError("profile_steps", steps, rule, f"end at {max_steps} or before")
        self.path = Path(f"trace_{self.first}_{self.last}.json.gz")
        self._profiler: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.path = Path(trainer.log_dir or trainer.default_root_dir) / self.path.name

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 == self.first and trainer.is_global_zero:
            os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # or it reports that there is no GPU as an error
            self._profiler = _profiler(next(pl_module.parameters()).device)
            self._profiler.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step >= self.last:
            self._write()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write()

    def _write(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            profiler.export_chrome_trace(str(self.path))


def _profiler(device: torch.device) -> Any:
    """What records a device; it has `start`, `stop` and `export_chrome_trace`."""
    if device.type == "xla":
        from mutransformer.xla.profile import DeviceTrace

        return DeviceTrace()
    activities = {"cuda": torch.profiler.ProfilerActivity.CUDA}
    recorded = [torch.profiler.ProfilerActivity.CPU, *([activities[device.type]] if device.type in activities else [])]
    return torch.profiler.profile(activities=recorded)
