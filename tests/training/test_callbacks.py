from __future__ import annotations

import csv
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import Batches, Outputs, fit, make_module, make_trainer, random_batch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback

from mutransformer.errors import Interrupted, NonFiniteError
from mutransformer.training.callbacks import (
    DetectNonFinite,
    LossPlot,
    Metrics,
    RunCheckpoint,
    StopOnSignal,
    plot_loss,
)
from mutransformer.training.module import DecoderModule
from mutransformer.training.schedule import ScheduleConfig, schedule_factor

PNG = b"\x89PNG\r\n\x1a\n"
BATCHES = [random_batch(seed=seed) for seed in range(6)]


def metrics_of(folder: Path, version: int = 0) -> list[dict[str, float]]:
    """The rows of the run's metrics.csv, without what is empty in a row."""
    with (folder / f"version_{version}" / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


# Metrics


def test_metrics_csv_has_a_row_every_n_steps_and_one_at_the_end(tmp_path):
    outputs, schedule = Outputs(), ScheduleConfig(total_steps=5)
    fit(make_module(schedule=schedule), tmp_path, BATCHES[:5], callbacks=(Metrics(), outputs), log_every_n_steps=2)
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [2, 4, 5]
    for row in rows:
        assert set(row) == {"step", "train_loss", "grad_norm", "schedule", "tokens_per_s", "tokens"}
        step = int(row["step"])
        assert row["train_loss"] == outputs.values[step - 1]["loss"]
        assert row["grad_norm"] == outputs.values[step - 1]["grad_norm"]
        assert row["tokens"] == step * 4 * 8
        assert row["tokens_per_s"] > 0
        assert row["schedule"] == pytest.approx(schedule_factor(step - 1, schedule))


def test_a_resumed_run_goes_on_counting_tokens(tmp_path):
    first, second = Metrics(), Metrics()
    fit(make_module(), tmp_path, BATCHES[:2], callbacks=(first,))
    second.load_state_dict(first.state_dict())
    fit(make_module(), tmp_path, BATCHES[:3], callbacks=(second,))
    assert [row["tokens"] for row in metrics_of(tmp_path, version=1)] == [96, 128, 160]


@pytest.mark.parametrize("max_steps", [3, 4])
def test_validation_loss_is_measured_every_n_steps_and_once_at_the_end(max_steps, tmp_path):
    module, metrics = make_module(), Metrics()
    trainer = make_trainer(tmp_path, max_steps, (metrics,), val_check_interval=2)
    trainer.fit(module, Batches(*BATCHES), Batches(BATCHES[5]))
    measured = [(row["step"], row["val_loss"]) for row in metrics_of(tmp_path) if "val_loss" in row]
    assert [step for step, _ in measured] == [2, max_steps]
    assert measured[1][1] == pytest.approx((module.loss_sum(BATCHES[5]) / 32).item(), rel=1e-6)
    assert metrics.last["val_loss"] == measured[1][1]


class Data(LightningDataModule):
    """Validation data whose tokens have a known number of bytes."""

    def val_dataloader(self):
        return Batches(BATCHES[0])

    def bytes_per_token(self, split: str) -> float:
        return {"validation": 2.5}[split]


def test_bits_per_byte_where_the_data_knows_its_bytes(tmp_path):
    metrics = Metrics()
    make_trainer(tmp_path, 1, (metrics,)).validate(make_module(), datamodule=Data(), verbose=False)
    assert metrics.last["val_bits_per_byte"] == pytest.approx(metrics.last["val_loss"] / math.log(2) / 2.5)
    without = Metrics()
    make_trainer(tmp_path, 1, (without,)).validate(make_module(), Batches(BATCHES[0]), verbose=False)
    assert set(without.last) == {"val_loss"}


# Checkpoints


class WithValidationLosses(DecoderModule):
    """Its validation losses are given."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__(**make_module().hyper_parameters)
        self.losses = iter(losses)

    def loss_sum(self, batch):
        return super().loss_sum(batch) if self.training else torch.tensor(32 * next(self.losses))


def test_last_is_written_every_n_steps_and_at_the_end_best_with_the_lowest_validation_loss(tmp_path):
    checkpoint, saved = RunCheckpoint(every_n_steps=2), []
    trainer = make_trainer(tmp_path, 5, (Metrics(), checkpoint), val_check_interval=1)
    save = trainer.save_checkpoint

    def watching_save(path, weights_only):
        saved.append((trainer.global_step, Path(path).name))
        save(path, weights_only)

    trainer.save_checkpoint = watching_save
    trainer.fit(WithValidationLosses([3.0, math.nan, 1.0, 2.0, 1.0]), Batches(*BATCHES), Batches(BATCHES[5]))
    assert saved == [(1, "best.ckpt"), (2, "last.ckpt"), (3, "best.ckpt"), (4, "last.ckpt"), (5, "last.ckpt")]
    folder = tmp_path / "version_0" / "checkpoints"
    assert checkpoint.last_path == str(folder / "last.ckpt")
    best = torch.load(folder / "best.ckpt")
    assert (best["global_step"], best["callbacks"]["RunCheckpoint"]) == (3, {"best_loss": 1.0})


def test_the_best_loss_is_remembered_by_a_resumed_run(tmp_path):
    checkpoint = RunCheckpoint()
    checkpoint.load_state_dict({"best_loss": 0.0})
    trainer = make_trainer(tmp_path, 1, (Metrics(), checkpoint), val_check_interval=1)
    trainer.fit(make_module(), Batches(BATCHES[0]), Batches(BATCHES[5]))
    assert [path.name for path in (tmp_path / "version_0" / "checkpoints").iterdir()] == ["last.ckpt"]


# Losses that are not finite


class BreaksAt(DecoderModule):
    """Its loss is NaN, or its gradient infinite, in one step."""

    step: int
    is_gradient: bool

    def loss_sum(self, batch):
        loss = super().loss_sum(batch)
        if self.trainer.global_step + 1 != self.step:
            return loss
        if not self.is_gradient:
            return loss * float("nan")
        edge = self.decoder.embedding.flatten()[0].square()
        return loss + (edge - edge).sqrt()  # 0, with a derivative that is not finite


def breaking_module(step: int, is_gradient: bool) -> BreaksAt:
    module = BreaksAt(**make_module().hyper_parameters)
    module.step, module.is_gradient = step, is_gradient
    return module


@pytest.mark.parametrize("is_gradient", [False, True])
def test_a_step_that_is_not_finite_ends_the_run_and_never_reaches_a_checkpoint(is_gradient, tmp_path):
    checkpoint, outputs = RunCheckpoint(every_n_steps=1), Outputs()
    callbacks = (outputs, checkpoint, DetectNonFinite(checkpoint), LossPlot(), Metrics())
    with pytest.raises(
        NonFiniteError, match=r"^loss or gradient norm is not finite at step 3; last good checkpoint: .*last\.ckpt;"
    ):
        fit(breaking_module(3, is_gradient), tmp_path, BATCHES, callbacks=callbacks)
    assert [math.isfinite(each["loss"]) for each in outputs.values] == [True, True, is_gradient]
    assert not math.isfinite(outputs.values[2]["grad_norm"])
    good = torch.load(checkpoint.last_path)
    assert good["global_step"] == 2
    assert all(tensor.isfinite().all() for tensor in good["state_dict"].values())
    assert (tmp_path / "version_0" / "loss.png").read_bytes().startswith(PNG)


def test_without_a_checkpoint_the_message_says_so(tmp_path):
    checkpoint = RunCheckpoint(every_n_steps=0)
    with pytest.raises(NonFiniteError, match="at step 1; no checkpoint was written before it; lower the learning rate"):
        fit(breaking_module(1, False), tmp_path, BATCHES, callbacks=(checkpoint, DetectNonFinite(checkpoint)))
    assert not (tmp_path / "version_0" / "checkpoints").exists()


def test_on_a_device_the_flag_is_read_when_metrics_are_due_and_before_a_checkpoint():
    def after_a_bad_step(step):
        callback = DetectNonFinite(RunCheckpoint())
        trainer = SimpleNamespace(global_step=step, log_every_n_steps=10)
        outputs = {"loss": torch.tensor(float("nan")), "grad_norm": torch.tensor(1.0)}
        callback.on_train_batch_end(trainer, SimpleNamespace(device=torch.device("cuda")), outputs, None, 0)
        return callback, trainer

    with pytest.raises(NonFiniteError, match="at step 20"):
        after_a_bad_step(20)
    callback, trainer = after_a_bad_step(21)
    with pytest.raises(NonFiniteError, match="at step 21"):
        callback.on_save_checkpoint(trainer, None, {})


def test_weights_that_are_not_finite_are_not_saved_even_where_the_loss_was(tmp_path):
    class Poison(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            module.optimizers().param_groups[0]["lr"] = float("inf")

    checkpoint = RunCheckpoint(every_n_steps=1)
    with pytest.raises(NonFiniteError, match="parameter embedding is not finite at step 1; no checkpoint"):
        fit(make_module(), tmp_path, BATCHES, callbacks=(Poison(), checkpoint, DetectNonFinite(checkpoint)))
    assert checkpoint.last_path is None


# Signals


def handlers() -> list:
    return [signal.getsignal(signum) for signum in StopOnSignal.SIGNALS]


class SignalAt(Callback):
    """Sends this process a signal inside a step."""

    def __init__(self, step: int, signum: int) -> None:
        self.step, self.signum = step, signum

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step + 1 == self.step:
            os.kill(os.getpid(), self.signum)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_raises(signum, tmp_path):
    before, checkpoint, outputs = signal.getsignal(signum), RunCheckpoint(), Outputs()
    callbacks = (SignalAt(2, signum), StopOnSignal(checkpoint), checkpoint, outputs)
    with pytest.raises(
        Interrupted, match=r"stopped after step 2, saved .*last\.ckpt\n.*--ckpt_path .*last\.ckpt"
    ) as stop:
        fit(make_module(), tmp_path, BATCHES, callbacks=callbacks)
    assert stop.value.signum == signum
    assert torch.load(checkpoint.last_path)["global_step"] == 2
    assert signal.getsignal(signum) is before


def test_a_second_signal_is_not_held_back(tmp_path):
    seen = []

    class Watch(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(signal.getsignal(signal.SIGTERM))

    checkpoint = RunCheckpoint()
    callbacks = (SignalAt(1, signal.SIGTERM), Watch(), StopOnSignal(checkpoint), checkpoint)
    with pytest.raises(Interrupted):
        fit(make_module(), tmp_path, BATCHES, callbacks=callbacks)
    assert seen == [signal.SIG_DFL]


@pytest.mark.parametrize("end", [lambda c: c.on_train_end(None, None), lambda c: c.on_exception(None, None, None)])
def test_handlers_are_put_back_when_training_ends(end):
    before, callback = handlers(), StopOnSignal(RunCheckpoint())
    callback.on_train_start(None, None)
    assert not set(handlers()) & set(before)
    end(callback)
    assert handlers() == before


def test_a_signal_outside_training_ends_the_command_at_once():
    before, callback = handlers(), StopOnSignal(RunCheckpoint())
    with pytest.raises(Interrupted, match="there is nothing to resume"), callback.handling():
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("went on after the signal")
    assert handlers() == before


# The plot


def test_the_run_ends_with_a_plot(tmp_path):
    trainer = make_trainer(tmp_path, 3, (Metrics(), LossPlot()), val_check_interval=1)
    trainer.fit(make_module(), Batches(*BATCHES[:3]), Batches(BATCHES[5]))
    assert (tmp_path / "version_0" / "loss.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("rows", ["1,3.0,\n2,2.5,\n2,,2.7\n", "1,,3.0\n", "1,3.0,\n"])
def test_plot_shows_every_point(rows, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    drawn, plot = {}, Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda *args, **kw: (drawn.update({kw["label"]: args[1:3]}), plot(*args, **kw)))
    (tmp_path / "metrics.csv").write_text("step,train_loss,val_loss\n" + rows)
    plot_loss(tmp_path / "metrics.csv", tmp_path / "loss.png")
    shown = {(name.split()[0], x, y) for name, (xs, ys) in drawn.items() for x, y in zip(xs, ys, strict=True)}
    lines = [line.split(",") for line in rows.split()]
    expected = {("train", int(step), float(loss)) for step, loss, _ in lines if loss}
    expected |= {("val", int(step), float(loss)) for step, _, loss in lines if loss}
    assert shown == expected
    assert len((tmp_path / "loss.png").read_bytes()) > 5000
