from __future__ import annotations

import math
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from helpers import Batches, Outputs, fit, make_module, make_trainer, random_batch
from lightning.pytorch.callbacks import Callback

from mutransformer.errors import Interrupted, NonFiniteError
from mutransformer.training.callbacks import DetectNonFinite, LossPlot, StopOnSignal, plot_loss
from mutransformer.training.module import DecoderModule
from mutransformer.training.run_checkpoint import RunCheckpoint
from mutransformer.training.run_metrics import Metrics

PNG = b"\x89PNG\r\n\x1a\n"
BATCHES = [random_batch(seed=seed) for seed in range(6)]


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
        NonFiniteError,
        match=r"^loss or gradient norm is not finite at step 3; last good checkpoint: .*step_00000002\.ckpt;",
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


def test_on_a_device_a_step_is_read_when_metrics_are_due_and_before_a_checkpoint():
    """Metrics are due at step 20: they and the loss are read when step 21 has been sent."""

    def after_a_bad_step(step):
        callback = DetectNonFinite(RunCheckpoint())
        trainer = SimpleNamespace(log_every_n_steps=10)
        for trainer.global_step in range(step, 22):
            loss = float("nan") if trainer.global_step >= step else 1.0  # weights that are not finite once stay so
            outputs = {name: OnDevice(value) for name, value in (("loss", loss), ("grad_norm", 1.0))}
            callback.on_train_batch_end(trainer, None, outputs, None, 0)
        return callback, trainer

    for step in (15, 20):
        with pytest.raises(NonFiniteError, match="at step 21"):
            after_a_bad_step(step)
    callback, trainer = after_a_bad_step(21)
    with pytest.raises(NonFiniteError, match="at step 21"):
        callback.on_save_checkpoint(trainer, None, {})


class OnDevice(float):
    """A number that lies on a GPU."""

    device = torch.device("cuda")

    def item(self):
        return float(self)


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
        Interrupted, match=r"stopped after step 2, saved .*step_00000002\.ckpt in .* s\n.*/config\.yaml --resume auto"
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
