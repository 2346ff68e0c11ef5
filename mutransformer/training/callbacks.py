"""What else happens around the steps: the NaN check, stopping on a signal, the profile, the loss plot."""

from __future__ import annotations

import csv
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from mutransformer.errors import Interrupted, NonFiniteError
from mutransformer.training.module import check_finite
from mutransformer.training.run_checkpoint import RunCheckpoint
from mutransformer.training.run_metrics import log_interval


class DetectNonFinite(Callback):
    """Stops at the first step whose loss or gradient norm is not finite; never lets such weights into a checkpoint.

    On the CPU every step is looked at; elsewhere, so that no step waits, each checkpoint and, once the next step was
    sent, those at which metrics are due: weights that are not finite once stay so.
    """

    def __init__(self, checkpoint: RunCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._newest: tuple[torch.Tensor, ...] = ()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        is_on_device = outputs["loss"].device.type != "cpu"
        if is_on_device and (trainer.global_step - 1) % log_interval(trainer) == 0:
            self._raise_if_bad(trainer)  # of the step before this one
        self._newest = (outputs["loss"], outputs["grad_norm"])
        if not is_on_device:
            self._raise_if_bad(trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._raise_if_bad(trainer)
        try:
            check_finite(checkpoint["state_dict"])
        except NonFiniteError as error:
            raise NonFiniteError(f"{error} {self._where(trainer)}") from None

    def _raise_if_bad(self, trainer: Trainer) -> None:
        if not all(math.isfinite(value.item()) for value in self._newest):
            raise NonFiniteError(f"loss or gradient norm is not finite {self._where(trainer)}")

    def _where(self, trainer: Trainer) -> str:
        last = self._checkpoint.settle(trainer)
        kept = f"last good checkpoint: {last}" if last else "no checkpoint was written before it"
        return f"at step {trainer.global_step}; {kept}; lower the learning rate, or go on with --detect_nan=false"


class StopOnSignal(Callback):
    """Raises `Interrupted` on SIGINT or SIGTERM: in training after the step is done and saved, elsewhere at once.

    A second signal in training ends the process without waiting.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, checkpoint: RunCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._is_training = False
        self._received: int | None = None
        self._previous: dict[int, Any] = {}

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Takes over the signals in the block; Lightning's own handlers would end without a word, or not at all."""
        previous = self._install()
        try:
            yield
        finally:
            self._restore(previous)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_training = True
        self._previous = self._install()  # Lightning puts its own in when a fit begins

    def _receive(self, signum: int, frame: Any) -> None:
        signal.signal(signum, signal.SIG_DFL)
        if not self._is_training:
            last = self._checkpoint.last_path
            raise Interrupted(signum, f"stopped; {f'checkpoint: {last}' if last else 'there is nothing to resume'}")
        self._received = signum

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._stop_if_received(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == "fit":
            self._stop_if_received(trainer)

    def _stop_if_received(self, trainer: Trainer) -> None:
        if self._received is not None:
            began = time.perf_counter()
            checkpoint = self._checkpoint.save_and_settle(trainer)
            raise Interrupted(
                self._received,
                f"stopped after step {trainer.global_step}, saved {checkpoint} in {time.perf_counter() - began:.1f} s\n"
                f"go on with: mutransformer fit --config {trainer.log_dir}/config.yaml --resume auto",
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_training = False
        self._restore(self._previous)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._is_training = False
        self._restore(self._previous)

    def _install(self) -> dict[int, Any]:
        return {signum: signal.signal(signum, self._receive) for signum in self.SIGNALS}

    def _restore(self, handlers: dict[int, Any]) -> None:
        while handlers:
            signal.signal(*handlers.popitem())


class LossPlot(Callback):
    """Draws `loss.png` from the run's `metrics.csv` when training ends, however it ends."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._draw(trainer)

    def _draw(self, trainer: Trainer) -> None:
        for logger in trainer.loggers:
            logger.save()
        metrics = Path(trainer.log_dir or "") / "metrics.csv"
        if trainer.is_global_zero and metrics.is_file():
            plot_loss(metrics, metrics.with_name("loss.png"))


def plot_loss(metrics: Path, target: Path) -> None:
    """Training and validation loss against optimizer steps, from a `metrics.csv` to a PNG."""
    from matplotlib.figure import Figure

    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, style in (("train_loss", "-"), ("val_loss", "o--")):
        points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name.replace("_", " "), markersize=4)
    axes.set(xlabel="optimizer step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120)
