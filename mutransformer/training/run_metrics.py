"""What a run says of itself: losses, gradient norm, speed, utilization; a row every `trainer.log_every_n_steps`.

Read by the callbacks beside it and by the command line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from mutransformer.training.module import COMPUTE_DTYPES, DecoderModule
from mutransformer.training.schedule import schedule_factor
from mutransformer.training.throughput import MfuConvention, flops_per_token, peak_flops_per_s, utilization

LN_2 = math.log(2)
_SPLITS = {"val": "validation", "test": "test"}


def log_scalars(trainer: Trainer, values: Mapping[str, float], step: int | None = None) -> None:
    """Writes `values` to every logger at a count of optimizer steps; None: of those done."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=trainer.global_step if step is None else step)


def n_devices(trainer: Trainer) -> int:
    """How many devices share a step: a process each, or all those of a mesh."""
    return getattr(trainer.strategy, "n_devices", trainer.world_size)


def log_interval(trainer: Trainer) -> int:
    """Optimizer steps between two rows of metrics."""
    return max(1, trainer.log_every_n_steps)  # type: ignore[attr-defined]  # Lightning sets it outside the class


@dataclass
class _Row:
    """A step whose row is due: its numbers are on the device still, and not waited for."""

    step: int
    n_tokens: int
    n_tokens_total: int
    train_s: float
    data_wait_s: float | None
    values: dict[str, torch.Tensor]


class Metrics(Callback):
    """A row every `trainer.log_every_n_steps` and at the end; validation loss when there is one.

    A row is read from the device when the next step has been sent, or when somebody waits for the device anyway: a
    checkpoint, a validation, the end. So no step waits for a row.

    Args:
        mfu_convention: which attention counts in `mfu` and `tflops_per_s`, see `flops_per_token`.
    Attributes:
        last: the newest value of each metric, for the summary of the run.
        evaluated_step: optimizer steps of the weights that are measured outside of a fit.
        tokens_per_s: mean over the run, waits for data and checkpoints included, validation left out.
    """

    def __init__(self, mfu_convention: MfuConvention = "causal") -> None:
        self.mfu_convention: MfuConvention = mfu_convention
        self.last: dict[str, float] = {}
        self.evaluated_step: int | None = None
        self._n_tokens = self._n_tokens_before = 0
        self._train_s = self._mark = 0.0
        self._due: _Row | None = None
        self._logged = _Row(0, 0, 0, 0.0, 0.0, {})

    @property
    def tokens_per_s(self) -> float:
        return self._n_tokens / self._train_s if self._train_s else 0.0

    @property
    def n_tokens(self) -> int:
        """Tokens trained on, those before a restart counted."""
        return self._n_tokens_before + self._n_tokens

    def state_dict(self) -> dict[str, Any]:
        return {"n_tokens": self.n_tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._n_tokens_before = state_dict["n_tokens"]

    def on_train_start(self, trainer: Trainer, pl_module: DecoderModule) -> None:
        self._mark = time.perf_counter()
        self._logged = _Row(trainer.global_step, 0, 0, 0.0, _data_wait_s(trainer), {})
        dtype = COMPUTE_DTYPES[str(trainer.precision)] or pl_module.dtype
        self._flops_per_token = flops_per_token(pl_module.config["decoder"], pl_module.plan, self.mfu_convention)
        self._peak = peak_flops_per_s(next(pl_module.decoder.parameters()).device, dtype)  # type: ignore[arg-type]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: DecoderModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        tokens = batch["tokens"][:, 1:]
        # on XLA a process sees the batch of all
        self._count(tokens.numel() * (1 if tokens.device.type == "xla" else trainer.world_size))
        self._read_due(trainer, pl_module)  # the step before this one: this one has been sent
        step = trainer.global_step
        if step == trainer.max_steps:
            trainer.should_stop = True  # Lightning then validates once more before it ends, whatever the interval
        if step % log_interval(trainer) == 0 or step == trainer.max_steps:
            values = {name: outputs[name] for name in ("loss", "grad_norm")}
            self._due = _Row(step, self._n_tokens, self.n_tokens, self._train_s, _data_wait_s(trainer), values)

    def _count(self, n_tokens: int) -> None:
        self._n_tokens += n_tokens
        now = time.perf_counter()
        self._train_s += now - self._mark
        self._mark = now

    def _read_due(self, trainer: Trainer, pl_module: Any) -> None:
        """Reads and logs the row that is due, if one is; waits for its step, and for no later one."""
        if self._due is None:
            return
        row, self._due = self._due, None
        loss, grad_norm = (row.values[name].item() for name in ("loss", "grad_norm"))
        if row.values["loss"].device.type != "cpu":  # the step ended about now, not when it was sent
            row.train_s = self._train_s + time.perf_counter() - self._mark
        n_steps, interval_s = row.step - self._logged.step, row.train_s - self._logged.train_s
        speed = (row.n_tokens - self._logged.n_tokens) / interval_s
        waited = {}
        if row.data_wait_s is not None and self._logged.data_wait_s is not None:
            waited["data_wait_s"] = (row.data_wait_s - self._logged.data_wait_s) / n_steps
        self._logged = row
        self.last["train_loss"] = loss
        values = {
            "train_loss": loss,
            "grad_norm": grad_norm,
            "schedule": schedule_factor(row.step - 1, pl_module.schedule),
            "tokens": float(row.n_tokens_total),
            "tokens_per_s": speed,
            "step_s": interval_s / n_steps,
            **waited,
            **utilization(speed, self._flops_per_token, self._peak, n_devices(trainer)),
        }
        log_scalars(trainer, values, row.step)
        trainer.callback_metrics["train_loss"] = torch.tensor(
            loss
        )  # for others' callbacks, as LightningModule.log does
        trainer.progress_bar_metrics.update({"train_loss": loss, "tokens/s": speed})

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._read_due(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_due(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_due(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        with suppress(RuntimeError):  # a device that failed has no numbers any more; its own error is the news
            self._read_due(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = time.perf_counter()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: DecoderModule) -> None:
        self._end_of_evaluation(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: DecoderModule) -> None:
        self._end_of_evaluation(trainer, pl_module, "test")

    def _end_of_evaluation(self, trainer: Trainer, pl_module: DecoderModule, prefix: str) -> None:
        loss = pl_module.val_loss.compute().item()
        with pl_module.val_loss.sync_context():  # of all processes, as in `compute`
            n_targets = pl_module.val_loss.n_targets.item()
        measured = {"loss": loss, **scores(trainer, loss, _SPLITS[prefix])}
        values = {f"{prefix}_{name}": value for name, value in measured.items()}
        self.last.update(values, **{f"{prefix}_targets": float(n_targets)})
        pl_module.val_loss.reset()
        pl_module.log_dict(values, prog_bar=True, logger=False, batch_size=1)
        if not trainer.sanity_checking:
            step = self.evaluated_step  # Lightning counts none there
            log_scalars(trainer, {**values, "tokens": float(self.n_tokens)}, step)


def scores(trainer: Trainer, loss: float, split: str = "validation") -> dict[str, float]:
    """What a loss in nats a token is in other units: `perplexity`, and `bits_per_byte` where the data know their bytes.

    Args:
        trainer: its datamodule may have `bytes_per_token`.
        loss: nats a token.
        split: whose bytes a token, of the whole split.
    """
    found = {"perplexity": math.exp(loss) if loss < 700 else math.inf}
    bytes_per_token = getattr(getattr(trainer, "datamodule", None), "bytes_per_token", None)
    return found if bytes_per_token is None else {**found, "bits_per_byte": loss / LN_2 / bytes_per_token(split)}


def _data_wait_s(trainer: Trainer) -> float | None:
    """Seconds that reading batches has taken so far; None for a loader that does not say."""
    return getattr(trainer.train_dataloader, "wait_s", None)
