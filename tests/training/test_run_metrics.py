from __future__ import annotations

import math

import pytest
import torch
from helpers import Batches, Outputs, fit, make_module, make_trainer, metrics_of, random_batch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback

from mutransformer.training import run_metrics
from mutransformer.training.run_checkpoint import RunCheckpoint
from mutransformer.training.run_metrics import Metrics
from mutransformer.training.schedule import ScheduleConfig, schedule_factor
from mutransformer.training.throughput import flops_per_token

BATCHES = [random_batch(seed=seed) for seed in range(6)]
COLUMNS = {"step", "train_loss", "grad_norm", "schedule", "tokens", "tokens_per_s", "step_s", "tflops_per_s"}


def test_metrics_csv_has_a_row_every_n_steps_and_one_at_the_end(tmp_path):
    outputs, schedule = Outputs(), ScheduleConfig(total_steps=5)
    module = make_module(schedule=schedule)
    flops = flops_per_token(module.config["decoder"], module.plan, "causal")
    fit(module, tmp_path, BATCHES[:5], callbacks=(Metrics(), outputs), log_every_n_steps=2)
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [2, 4, 5]
    for row in rows:
        assert set(row) == COLUMNS
        step = int(row["step"])
        assert row["train_loss"] == outputs.values[step - 1]["loss"]
        assert row["grad_norm"] == outputs.values[step - 1]["grad_norm"]
        assert row["tokens"] == step * 4 * 8
        assert row["tokens_per_s"] * row["step_s"] == pytest.approx(4 * 8)
        assert row["tflops_per_s"] == pytest.approx(row["tokens_per_s"] * flops / 1e12)
        assert row["schedule"] == pytest.approx(schedule_factor(step - 1, schedule))


def test_a_resumed_run_goes_on_counting_tokens(tmp_path):
    first, second = Metrics(), Metrics()
    fit(make_module(), tmp_path, BATCHES[:2], callbacks=(first,))
    second.load_state_dict(first.state_dict())
    fit(make_module(), tmp_path, BATCHES[:3], callbacks=(second,))
    assert [row["tokens"] for row in metrics_of(tmp_path, version=1)] == [96, 128, 160]


class Reads(Callback):
    """Notes, each time a number is read from a tensor, how many steps have been sent."""

    def __init__(self, monkeypatch) -> None:
        self.steps: list[int] = []
        self._n_sent = 0
        item = torch.Tensor.item
        monkeypatch.setattr(torch.Tensor, "item", lambda tensor: (self.steps.append(self._n_sent), item(tensor))[1])

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self._n_sent = trainer.global_step + 1


def test_a_row_is_read_after_the_next_step_was_sent_and_the_last_one_is_not_lost(tmp_path, monkeypatch):
    reads = Reads(monkeypatch)
    fit(make_module(), tmp_path, BATCHES[:6], callbacks=(reads, Metrics()), log_every_n_steps=2)
    assert reads.steps == [3, 3, 5, 5, 6, 6]  # loss and gradient norm of steps 2, 4 and 6
    assert [row["step"] for row in metrics_of(tmp_path)] == [2, 4, 6]


def test_a_row_is_there_before_a_checkpoint_of_its_step_is(tmp_path):
    """Else a run that goes on from the checkpoint would lack it."""
    seen = []

    class Watch(RunCheckpoint):
        def save(self, trainer, **kwargs):
            super().save(trainer, **kwargs)
            seen.append([row["step"] for row in metrics_of(tmp_path)])

    fit(make_module(), tmp_path, BATCHES[:4], callbacks=(Metrics(), Watch(every_n_steps=2)))
    assert seen[:2] == [[1, 2], [1, 2, 3, 4]]


def test_a_row_is_there_when_the_run_fails(tmp_path):
    class Fail(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 2:
                raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fit(make_module(), tmp_path, BATCHES[:4], callbacks=(Metrics(), Fail()))
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2]


def test_the_wait_for_data_is_that_of_the_loader(tmp_path):
    class Slow(Batches):
        wait_s = 1.0  # of an earlier run

        def __iter__(self):
            for batch in super().__iter__():
                self.wait_s += 0.25
                yield batch

    trainer = make_trainer(tmp_path, 4, (Metrics(),), log_every_n_steps=2, limit_val_batches=0)
    trainer.fit(make_module(), Slow(*BATCHES), Batches(BATCHES[0]))
    assert [row["data_wait_s"] for row in metrics_of(tmp_path)] == [0.25, 0.25]


def test_mfu_is_logged_where_the_peak_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(run_metrics, "peak_flops_per_s", lambda device, dtype: 1e12)
    fit(make_module(), tmp_path, BATCHES[:2], callbacks=(Metrics("palm"),))
    rows = metrics_of(tmp_path)
    assert len(rows) == 2 and all(row["mfu"] == pytest.approx(row["tflops_per_s"]) for row in rows)


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
    assert set(without.last) == {"val_loss", "val_perplexity", "val_targets"}
    assert without.last["val_perplexity"] == pytest.approx(math.exp(without.last["val_loss"]))
