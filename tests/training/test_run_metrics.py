from __future__ import annotations

import math

import pytest
import torch
from helpers import Batches, Outputs, fit, make_module, make_trainer, metrics_of, random_batch
from lightning.pytorch import LightningDataModule

from mutransformer.training.run_metrics import Metrics
from mutransformer.training.schedule import ScheduleConfig, schedule_factor

BATCHES = [random_batch(seed=seed) for seed in range(6)]



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
