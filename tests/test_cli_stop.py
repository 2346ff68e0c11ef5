"""Stopping and going on: signals, kill -9, resume in mid-epoch; always to the bits of the run that was not stopped."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from cli_runs import assert_same_state, in_own_process, last_checkpoint, tiny, write_corpus

from mutransformer.cli import main


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undisturbed")
    assert main(["fit", *tiny(corpus, root)]) == 0
    return last_checkpoint(root)


def wait_for(path: Path, timeout_s: float = 120) -> None:
    """Returns once `path` exists."""
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_saves_and_the_printed_command_goes_on_to_the_same_bits(signum, code, corpus, undisturbed, tmp_path):
    # epochs are longer than the 7 steps between checkpoints, so a stop falls into the middle of one
    slow = "--trainer.callbacks+=cli_runs.SlowSteps"
    process = in_own_process("fit", *tiny(corpus, tmp_path, slow, "--checkpoint.every_n_steps=7"))
    wait_for(tmp_path / "version_0/checkpoints/last.ckpt")
    process.send_signal(signum)
    out, error = process.communicate(timeout=120)
    assert process.returncode == code, error
    assert "Traceback" not in out + error
    saved = torch.load(last_checkpoint(tmp_path), weights_only=True)
    assert 7 <= saved["global_step"] < 60
    command = re.search(r"go on with: mutransformer (.*)", out)
    assert command is not None
    assert main([*command[1].split(), f"--trainer.default_root_dir={tmp_path / 'on'}"]) == 0
    assert_same_state(undisturbed, last_checkpoint(tmp_path / "on"))


def killed_runs_reach_the_same_bits(n_kills: int, n_steps: int, corpus: str, root: Path) -> None:
    """Kills a run that saves at every step `n_kills` times at random moments, resumes, and compares the end.

    `n_steps` must be more than the run makes between its kills, half a second each.
    """
    draw, resume, length = random.Random(0), [], f"--trainer.max_steps={n_steps}"
    assert main(["fit", *tiny(corpus, root / "undisturbed", length)]) == 0
    for i in range(n_kills):
        process = in_own_process("fit", *tiny(corpus, root / str(i), length, "--checkpoint.every_n_steps=1", *resume))
        wait_for(root / str(i) / "version_0/checkpoints/last.ckpt")
        time.sleep(draw.uniform(0, 0.5))
        process.kill()
        process.communicate(timeout=60)
        resume = [f"--ckpt_path={last_checkpoint(root / str(i))}"]
        assert 0 < torch.load(last_checkpoint(root / str(i)), weights_only=True)["global_step"] < n_steps
    assert main(["fit", *tiny(corpus, root / "on", length, *resume)]) == 0
    assert_same_state(last_checkpoint(root / "undisturbed"), last_checkpoint(root / "on"))


def test_kill_9_leaves_the_last_checkpoint_readable(corpus, tmp_path):
    killed_runs_reach_the_same_bits(2, 300, corpus, tmp_path)


@pytest.mark.slow
def test_many_kills_at_random_moments(corpus, tmp_path):
    killed_runs_reach_the_same_bits(12, 1500, corpus, tmp_path)


@pytest.mark.parametrize("steps", [[32], [20, 34], [31, 32, 33]])
def test_shorter_runs_in_a_row_equal_one_long_run(steps, corpus, undisturbed, tmp_path):
    """At the end of an epoch (32 batches), just before, just after, and in the middle of one, several times over."""
    resume: list[str] = []
    for step in steps:
        root = tmp_path / str(step)
        signal_at = ["--trainer.callbacks+=cli_runs.SignalAt", f"--trainer.callbacks.step={step}"]
        assert main(["fit", *tiny(corpus, root, *signal_at, *resume)]) == 143
        resume = [f"--ckpt_path={last_checkpoint(root)}"]
        assert torch.load(last_checkpoint(root), weights_only=True)["global_step"] == step
    assert main(["fit", *tiny(corpus, tmp_path / "on", *resume)]) == 0
    assert_same_state(undisturbed, last_checkpoint(tmp_path / "on"))


def test_signal_before_the_first_step_says_that_there_is_nothing_to_resume(corpus, tmp_path):
    slow = "--trainer.callbacks+=cli_runs.SlowSetup"
    process = in_own_process("fit", *tiny(corpus, tmp_path, slow))
    wait_for(tmp_path / "version_0/config.yaml")
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "nothing to resume" in out and "Traceback" not in out + error


def test_helps_are_quick():
    """A ceiling ten times what is usual: it is the heavy imports that must not come back."""
    started = time.monotonic()
    process = in_own_process("--help")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "describe" in out
    assert time.monotonic() - started < 2
