"""A run that was stopped and resumed takes the same steps, to the bit, as one that was not."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from helpers import Batches, make_module, make_trainer, random_batch, small
from lightning.pytorch.callbacks import Callback

from mutransformer.errors import Interrupted
from mutransformer.mup.config import OptimizerConfig
from mutransformer.training.callbacks import StopOnSignal
from mutransformer.training.run_checkpoint import RunCheckpoint
from mutransformer.training.schedule import ScheduleConfig, schedule_factor

N_STEPS, N_STOP = 7, 3
SCHEDULE = ScheduleConfig(kind="cosine", warmup_steps=2, total_steps=N_STEPS)
OPTIMIZERS = {
    "adamw": OptimizerConfig(weight_decay=1e-3),
    "lion": OptimizerConfig(algorithm="lion", learning_rate=1e-3),
    "sgd": OptimizerConfig(algorithm="sgd", momentum=0.9, weight_decay=1e-3),
}
ALGORITHMS = pytest.mark.parametrize("algorithm", OPTIMIZERS)


class Resumable:
    """A loader that goes on where it was: batch number n is the same in every run."""

    def __init__(self) -> None:
        self.n_given = 0

    def __iter__(self):
        while self.n_given < len(self):
            self.n_given += 1
            yield random_batch(seed=self.n_given)

    def __len__(self) -> int:
        return 100

    def state_dict(self) -> dict[str, int]:
        return {"n_given": self.n_given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n_given = state["n_given"]


def run(folder, algorithm, max_steps, callbacks=(), ckpt_path=None, schedule=SCHEDULE):
    """Trains up to `max_steps`, from a checkpoint if there is one."""
    module = make_module(small(d_model=32), optimizer=OPTIMIZERS[algorithm], schedule=schedule)
    checkpoint = RunCheckpoint()
    callbacks = (*callbacks, StopOnSignal(checkpoint), checkpoint)
    trainer = make_trainer(folder, max_steps, callbacks, limit_val_batches=0)
    trainer.fit(module, Resumable(), Batches(random_batch()), ckpt_path=ckpt_path)
    return trainer, module


def last_checkpoint(trainer) -> str:
    return f"{trainer.log_dir}/checkpoints/last.ckpt"


def stopped_by_the_end(folder, algorithm) -> str:
    trainer, _ = run(folder, algorithm, N_STOP)
    return last_checkpoint(trainer)


def stopped_by_a_signal(folder, algorithm) -> str:
    class Kill(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            self.trainer = trainer
            if trainer.global_step == N_STOP - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    kill = Kill()
    with pytest.raises(Interrupted):
        run(folder, algorithm, N_STEPS, (kill,))
    return last_checkpoint(kill.trainer)


class LearningRates(Callback):
    """Each group's learning rate in each step, by step count before it."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen[trainer.global_step] = {group["name"]: group["lr"] for group in trainer.optimizers[0].param_groups}


@ALGORITHMS
@pytest.mark.parametrize("stop", [stopped_by_the_end, stopped_by_a_signal])
def test_a_resumed_run_is_the_run_that_was_never_stopped(stop, algorithm, tmp_path):
    straight_trainer, straight = run(tmp_path, algorithm, N_STEPS)
    path = stop(tmp_path, algorithm)
    assert torch.load(path)["global_step"] == N_STOP
    resumed_trainer, resumed = run(tmp_path, algorithm, N_STEPS, ckpt_path=path)
    assert resumed_trainer.global_step == straight_trainer.global_step == N_STEPS
    for name, parameter in straight.decoder.named_parameters():
        assert torch.equal(resumed.decoder.get_parameter(name), parameter)


@ALGORITHMS
def test_learning_rates_go_on_where_the_schedule_stood(algorithm, tmp_path):
    rates = LearningRates()
    path = stopped_by_the_end(tmp_path, algorithm)
    _, module = run(tmp_path, algorithm, N_STEPS, (rates,), path)
    assert list(rates.seen) == list(range(N_STOP, N_STEPS))
    for step, of_groups in rates.seen.items():
        peaks = {row.name: row.lr for row in module.plan.rows}
        expected = {name: peak * schedule_factor(step, SCHEDULE) for name, peak in peaks.items()}
        assert of_groups == pytest.approx(expected, rel=1e-12)


def test_a_run_resumed_for_longer_follows_the_longer_schedule_from_its_first_step(tmp_path):
    rates, longer = LearningRates(), ScheduleConfig(total_steps=2 * N_STEPS)
    path = stopped_by_the_end(tmp_path, "adamw")
    _, module = run(tmp_path, "adamw", 2 * N_STEPS, (rates,), path, schedule=longer)
    peak = next(row.lr for row in module.plan.rows if row.name == "w_query")
    followed = {step: of_groups["w_query"] for step, of_groups in rates.seen.items()}
    steps = range(N_STOP, 2 * N_STEPS)
    assert followed == pytest.approx({step: peak * schedule_factor(step, longer) for step in steps}, rel=1e-12)


def test_without_the_optimizers_state_the_run_would_be_another(tmp_path):
    _, straight = run(tmp_path, "adamw", N_STEPS)
    path = stopped_by_the_end(tmp_path, "adamw")
    checkpoint = torch.load(path)
    checkpoint["optimizer_states"][0]["state"] = {}
    torch.save(checkpoint, path)
    _, resumed = run(tmp_path, "adamw", N_STEPS, ckpt_path=path)
    assert not torch.allclose(resumed.decoder.w_query, straight.decoder.w_query, rtol=0, atol=1e-4)
