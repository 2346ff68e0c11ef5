from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from helpers import Batches, fit, make_module, make_trainer, random_batch

from mutransformer.errors import ConfigError, SaveError
from mutransformer.training.checkpoint import AtomicCheckpointIO, BackgroundCheckpointIO, checkpoints_in
from mutransformer.training.module import DecoderModule
from mutransformer.training.run_checkpoint import RunCheckpoint
from mutransformer.training.run_metrics import Metrics

BATCHES = [random_batch(seed=seed) for seed in range(6)]



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
