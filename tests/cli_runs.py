"""Runs of the command line on a tiny model and a tiny corpus, in this process or in one of its own."""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

TINY = (
    "--data.dataset=text",
    "--data.validation_fraction=0.2",
    "--data.sequence_len=32",
    "--data.tokens_per_batch=512",
    "--model.decoder.d_model=32",
    "--model.decoder.d_head=16",
    "--model.decoder.n_layer=2",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=60",
    "--trainer.val_check_interval=15",
    "--trainer.log_every_n_steps=5",
    "--trainer.accumulate_grad_batches=3",
    "--trainer.gradient_clip_val=0.5",
)


def write_corpus(folder: Path) -> str:
    """Forty short documents of made-up words; returns the glob of their files."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(1, 7))) for _ in range(50)]
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(" ".join(draw.choices(words, k=100)))
    return str(folder / "*.txt")


def tiny(corpus: str, root: Path, *more: str) -> list[str]:
    """Command line after `fit` for a run of 60 steps over 32 batches an epoch, into `root`."""
    return [*TINY, f"--data.data_files={corpus}", f"--trainer.default_root_dir={root}", *more]


class SignalAt(Callback):
    """Sends SIGTERM to this process while step `step` is under way."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step - 1:
            os.kill(os.getpid(), signal.SIGTERM)


class SignalInValidation(Callback):
    """Sends SIGTERM to this process in the validation after step `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_validation_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


class SlowSteps(Callback):
    """Makes each step long enough for a signal to come before the last."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        time.sleep(0.03)


class SlowSetup(Callback):
    """Keeps the command in its set-up, before the first step, for a minute."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        time.sleep(60)


def in_own_process(*args: str, **options: Any) -> subprocess.Popen[str]:
    """Starts `mutransformer ARGS` with output and errors piped."""
    return subprocess.Popen(
        [sys.executable, "-m", "mutransformer.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(Path(__file__).parent),  # for the callbacks above
            **options.pop("env", {}),
        },
        **options,
    )


def last_checkpoint(root: Path) -> Path:
    """`last.ckpt` of the newest run under `root`."""
    runs = sorted(root.glob("version_*"), key=lambda run: int(run.name.removeprefix("version_")))
    return runs[-1] / "checkpoints" / "last.ckpt"


def assert_same_rows(left: Path, right: Path) -> None:
    """The metrics.csv of two run folders has the same rows in the same order, but for times."""
    rows = []
    for folder in (left, right):
        with (folder / "metrics.csv").open(newline="") as file:
            kept = ("step", "tokens", "schedule", "train_loss", "grad_norm", "val_loss")
            rows.append([{name: row[name] for name in kept} for row in csv.DictReader(file)])
    assert rows[0] == rows[1] != []


def assert_same_state(left: Path, right: Path) -> None:
    """Weights, optimizer, schedule and loader of two checkpoints agree to the bit.

    Lightning's own counters of epochs and validations are left out: they drift where a run is resumed twice at the end
    of an epoch or at a validation. Training does not read them; the loader's state says where it is.
    """
    a, b = (torch.load(path, weights_only=True) for path in (left, right))
    assert a["global_step"] == b["global_step"]
    assert a["lr_schedulers"] == b["lr_schedulers"]
    loaders = [checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] for checkpoint in (a, b)]
    assert loaders[0] == loaders[1] != [], loaders
    for ours, theirs in ((a["state_dict"], b["state_dict"]), *_optimizer_states(a, b)):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name
    assert a["optimizer_states"][0]["param_groups"] == b["optimizer_states"][0]["param_groups"]


def _optimizer_states(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    ours, theirs = (checkpoint["optimizer_states"][0]["state"] for checkpoint in (a, b))
    assert ours and ours.keys() == theirs.keys()
    return [(ours[i], theirs[i]) for i in ours]
