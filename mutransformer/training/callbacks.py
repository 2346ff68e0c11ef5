"""What happens around the steps: metrics, checkpoints, NaN detection, stopping on a signal, the loss plot."""

from __future__ import annotations

import csv
import math
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint

from mutransformer.errors import ConfigError, Interrupted, NonFiniteError
from mutransformer.training.module import DecoderModule, check_finite
from mutransformer.training.schedule import schedule_factor

LN_2 = 0.6931471805599453
_SPLITS = {"val": "validation", "test": "test"}


def log_scalars(trainer: Trainer, values: Mapping[str, float]) -> None:
    """Writes `values` to every logger at the count of optimizer steps done."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=trainer.global_step)


def _log_interval(trainer: Trainer) -> int:
    return max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]  # Lightning sets it outside the class


class Metrics(Callback):
    """Loss, gradient norm, schedule and tokens/s every `trainer.log_every_n_steps`; validation loss when there is one.

    Attributes:
        last: the newest value of each metric, for the summary of the run.
        tokens_per_s: mean over the run, waits for data and checkpoints included, validation left out.
    """

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self._n_tokens = self._n_tokens_logged = self._n_tokens_before = 0
        self._train_s = self._train_s_logged = 0.0
        self._mark = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self._n_tokens / self._train_s if self._train_s else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"n_tokens": self._n_tokens_before + self._n_tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._n_tokens_before = state_dict["n_tokens"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: DecoderModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == trainer.max_steps:
            trainer.should_stop = True  # Lightning then validates once more before it ends, whatever the interval
        is_due = step % _log_interval(trainer) == 0 or step == trainer.max_steps
        values = {name: outputs[name].item() for name in ("loss", "grad_norm")} if is_due else {}
        self._n_tokens += batch["tokens"][:, 1:].numel() * trainer.world_size
        now = time.perf_counter()
        self._train_s += now - self._mark
        self._mark = now
        if not is_due:
            return
        self.last["train_loss"] = values["loss"]
        interval_s = self._train_s - self._train_s_logged
        speed = (self._n_tokens - self._n_tokens_logged) / interval_s
        self._n_tokens_logged, self._train_s_logged = self._n_tokens, self._train_s
        log_scalars(
            trainer,
            {
                "train_loss": values["loss"],
                "grad_norm": values["grad_norm"],
                "schedule": schedule_factor(step - 1, pl_module.schedule),
                "tokens_per_s": speed,
                "tokens": float(self._n_tokens_before + self._n_tokens),
            },
        )
        shown = {"train_loss": values["loss"], "tokens/s": speed}
        pl_module.log_dict(shown, prog_bar=True, logger=False, batch_size=1)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = time.perf_counter()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: DecoderModule) -> None:
        self._end_of_evaluation(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: DecoderModule) -> None:
        self._end_of_evaluation(trainer, pl_module, "test")

    def _end_of_evaluation(self, trainer: Trainer, pl_module: DecoderModule, prefix: str) -> None:
        loss = pl_module.val_loss.compute().item()
        pl_module.val_loss.reset()
        values = {f"{prefix}_loss": loss, f"{prefix}_bits_per_byte": bits_per_byte(trainer, loss, _SPLITS[prefix])}
        values = {name: value for name, value in values.items() if value is not None}
        self.last.update(values)
        pl_module.log_dict(values, prog_bar=True, logger=False, batch_size=1)
        if not trainer.sanity_checking:
            log_scalars(trainer, values)


def bits_per_byte(trainer: Trainer, loss: float, split: str = "validation") -> float | None:
    """Loss in nats a token -> bits a byte of the split's text; None where the data cannot tell its bytes."""
    bytes_per_token = getattr(getattr(trainer, "datamodule", None), "bytes_per_token", None)
    return None if bytes_per_token is None else loss / LN_2 / bytes_per_token(split)


class RunCheckpoint(Checkpoint):
    """Keeps `last.ckpt` (newest) and `best.ckpt` (lowest validation loss) in the run folder's `checkpoints/`.

    Args:
        every_n_steps: optimizer steps between two writes of last.ckpt, 0 for none; the end of the run is written too.
        save_best: also keep the checkpoint with the lowest validation loss.
        dirpath: folder; null: `checkpoints` in the run folder.
    """

    def __init__(self, every_n_steps: int = 500, save_best: bool = True, dirpath: str | None = None) -> None:
        self.every_n_steps = every_n_steps
        self.save_best = save_best
        self.dirpath = dirpath
        if every_n_steps < 0:
            raise ConfigError(
                "checkpoint.every_n_steps", every_n_steps, "must not be negative", "use 0 for the end alone"
            )
        self.best_loss = float("inf")
        self.last_path: str | None = None
        self._saved_step = -1
        self._has_stepped = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.dirpath is None:
            self.dirpath = str(Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints")

    def save_last(self, trainer: Trainer) -> str:
        """Writes last.ckpt for the present step, if it is not there yet; returns its path."""
        if self._saved_step != trainer.global_step:
            path = f"{self.dirpath}/last.ckpt"
            trainer.save_checkpoint(path, weights_only=False)
            self.last_path = path
            self._saved_step = trainer.global_step
        return str(self.last_path)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._has_stepped = True
        step = trainer.global_step
        if step == trainer.max_steps or (self.every_n_steps and step % self.every_n_steps == 0):
            self.save_last(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loss = trainer.callback_metrics.get("val_loss")
        if not (self.save_best and trainer.state.fn == "fit") or trainer.sanity_checking or loss is None:
            return
        if loss < self.best_loss:
            self.best_loss = float(loss)
            trainer.save_checkpoint(f"{self.dirpath}/best.ckpt", weights_only=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._has_stepped:
            self.save_last(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"best_loss": self.best_loss}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss = state_dict["best_loss"]


class DetectNonFinite(Callback):
    """Stops at a loss or gradient norm that is not finite; never lets such weights into a checkpoint.

    On the CPU every step is looked at; elsewhere, so that no step waits, those at which metrics are due, and each
    checkpoint: weights that are not finite once stay so.
    """

    def __init__(self, checkpoint: RunCheckpoint) -> None:
        self._checkpoint = checkpoint
        self._newest: tuple[torch.Tensor, ...] = ()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._newest = (outputs["loss"], outputs["grad_norm"])
        if outputs["loss"].device.type == "cpu" or trainer.global_step % _log_interval(trainer) == 0:
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
        last = self._checkpoint.last_path
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
            checkpoint = self._checkpoint.save_last(trainer)
            raise Interrupted(
                self._received,
                f"stopped after step {trainer.global_step}, saved {checkpoint}\n"
                f"go on with: mutransformer fit --config {trainer.log_dir}/config.yaml --ckpt_path {checkpoint}",
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
