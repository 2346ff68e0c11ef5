"""Stopping and going on: signals, kill -9, resume in mid-epoch; always to the bits of the run that was not stopped."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cli_runs import assert_same_rows, assert_same_state, in_own_process, last_checkpoint, tiny, write_corpus

from mutransformer.cli import main
from mutransformer.training.run_folder import RunLogger


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def undisturbed(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("undisturbed")
    assert main(["fit", *tiny(corpus, root)]) == 0
    return last_checkpoint(root)


def wait_until(holds: Callable[[], bool], timeout_s: float = 120) -> None:
    """Returns once `holds()`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def wait_for(path: Path) -> None:
    """Returns once `path` exists."""
    wait_until(path.exists)


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
    assert main(command[1].split()) == 0
    assert_same_state(undisturbed, last_checkpoint(tmp_path))
    assert_same_rows(undisturbed.parents[1], tmp_path / "version_0")


def killed_runs_reach_the_same_bits(n_kills: int, n_steps: int, corpus: str, root: Path) -> None:
    """Kills a run that saves at every step `n_kills` times at random moments, goes on, and compares the end.

    Every other time the moment may be one before the first step. `n_steps` must be more than the run makes between its
    kills, half a second each.
    """
    draw = random.Random(0)
    options = [f"--trainer.max_steps={n_steps}", "--checkpoint.every_n_steps=1", "--trainer.val_check_interval=50"]
    assert main(["fit", *tiny(corpus, root / "undisturbed", *options)]) == 0
    last = root / "killed" / "version_0/checkpoints/last.ckpt"
    for i in range(n_kills):
        before = last.readlink() if last.is_symlink() else None
        process = in_own_process("fit", *tiny(corpus, root / "killed", *options, "--resume=auto"))
        if i % 2:
            time.sleep(draw.uniform(0, 5))
        else:
            wait_until(lambda before=before: last.is_symlink() and last.readlink() != before)
            time.sleep(draw.uniform(0, 0.5))
        process.kill()
        out, error = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, out + error
    assert 0 < torch.load(last, weights_only=True)["global_step"] < n_steps
    assert main(["fit", *tiny(corpus, root / "killed", *options, "--resume=auto")]) == 0
    assert [path.name for path in (root / "killed").iterdir()] == ["version_0"]
    assert_same_state(last_checkpoint(root / "undisturbed"), last)
    assert_same_rows(root / "undisturbed/version_0", root / "killed/version_0")


def test_kill_9_leaves_a_run_that_goes_on(corpus, tmp_path):
    killed_runs_reach_the_same_bits(2, 400, corpus, tmp_path)


@pytest.mark.slow
def test_many_kills_at_random_moments(corpus, tmp_path):
    killed_runs_reach_the_same_bits(20, 2500, corpus, tmp_path)


@pytest.mark.parametrize("signal_at", ["SignalInValidation", "SignalAt"])
def test_a_signal_at_a_validation_leaves_it_to_the_run_that_goes_on(signal_at, corpus, undisturbed, tmp_path):
    options = [f"--trainer.callbacks+=cli_runs.{signal_at}", "--trainer.callbacks.step=30"]
    assert main(["fit", *tiny(corpus, tmp_path, *options)]) == 143
    assert main(["fit", *tiny(corpus, tmp_path, "--resume=auto")]) == 0
    assert_same_state(undisturbed, last_checkpoint(tmp_path))
    assert_same_rows(undisturbed.parents[1], tmp_path / "version_0")


def test_two_signals_end_the_run_at_once_and_the_one_before_the_last_checkpoint_is_kept(corpus, tmp_path):
    slow = "--trainer.callbacks+=cli_runs.SlowSteps"
    process = in_own_process("fit", *tiny(corpus, tmp_path, slow, "--checkpoint.every_n_steps=5"))
    wait_for(tmp_path / "version_0/checkpoints/last.ckpt")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGTERM, 143)
    assert main(["fit", *tiny(corpus, tmp_path, "--resume=auto", "--trainer.max_steps=20")]) == 0
    assert torch.load(last_checkpoint(tmp_path), weights_only=True)["global_step"] == 20


# Going on by itself


def test_resume_passes_over_what_is_damaged_or_of_another_configuration(corpus, tmp_path, capsys):
    kept = "--checkpoint.keep_last=2"
    assert main(["fit", *tiny(corpus, tmp_path, "--trainer.max_steps=30", kept)]) == 0
    other = tiny(corpus, tmp_path, "--trainer.max_steps=2", "--seed_everything=2")
    assert main(["fit", *other]) == 0
    newest = tmp_path / "version_0/checkpoints/step_00000030.ckpt"
    newest.write_bytes(newest.read_bytes()[:1000])
    capsys.readouterr()
    assert main(["fit", *tiny(corpus, tmp_path, "--resume=auto", kept)]) == 0
    said = capsys.readouterr().out
    assert "step_00000002.ckpt is of another configuration: model.seed is 2 there and 1 here" in said
    assert f"passed over: ckpt_path='{newest}': is not readable" in said
    assert f"goes on from {tmp_path}/version_0/checkpoints/step_00000015.ckpt, step 15" in said
    assert {path.name for path in tmp_path.iterdir()} == {"version_0", "version_1"}


def test_resume_starts_anew_where_there_is_nothing_and_says_so(corpus, undisturbed, tmp_path, capsys):
    assert main(["fit", *tiny(corpus, tmp_path, "--resume=auto")]) == 0
    assert f"no checkpoint of this configuration in {tmp_path}; starts anew" in capsys.readouterr().out
    assert_same_state(undisturbed, last_checkpoint(tmp_path))
    assert main(["fit", *tiny(corpus, tmp_path, "--resume=auto")]) == 0
    assert "no step was made: the run was complete" in capsys.readouterr().out
    assert_same_rows(undisturbed.parents[1], tmp_path / "version_0")
    longer = tiny(corpus, tmp_path, "--resume=auto", "--trainer.max_steps=70")
    assert main(["fit", *longer]) == 0
    assert "goes on from" in capsys.readouterr().out
    assert torch.load(last_checkpoint(tmp_path), weights_only=True)["global_step"] == 70


def test_a_folder_of_checkpoints_elsewhere_is_gone_on_with_and_not_taken_by_another_run(corpus, tmp_path, capsys):
    folder = f"--checkpoint.dirpath={tmp_path / 'kept'}"
    assert main(["fit", *tiny(corpus, tmp_path / "a", folder, "--trainer.max_steps=15")]) == 0
    assert main(["fit", *tiny(corpus, tmp_path / "b", folder)]) == 2
    assert "holds checkpoints of another run" in capsys.readouterr().err
    assert not list((tmp_path / "b").iterdir())
    # as on another machine: without the run folder
    assert main(["fit", *tiny(corpus, tmp_path / "b", folder, "--resume=auto", "--trainer.max_steps=20")]) == 0
    assert torch.load(tmp_path / "kept/last.ckpt", weights_only=True)["global_step"] == 20
    assert (tmp_path / "b/version_0/metrics.csv").is_file()


def test_half_a_row_that_a_kill_left_is_taken_out(tmp_path):
    folder = tmp_path / "version_3"
    folder.mkdir()
    (folder / "metrics.csv").write_text("step,train_loss\n1,3.0\n2,2.5\n3,2.0\n4")
    logger = RunLogger(str(tmp_path), 3, resumed_step=4)
    logger.log_metrics({"train_loss": 1.5, "val_loss": 1.0}, step=5)
    logger.save()
    text = (folder / "metrics.csv").read_text()
    assert text.split() == ["step,train_loss,val_loss", "1,3.0,", "2,2.5,", "3,2.0,", "5,1.5,1.0"]


def test_a_new_run_takes_the_next_number_after_the_folders_that_are_there(tmp_path):
    assert RunLogger(str(tmp_path / "none")).version == 0
    (tmp_path / "version_3").mkdir()
    (tmp_path / "version_old").mkdir()
    (tmp_path / "version_7").touch()
    assert RunLogger(str(tmp_path)).version == 4


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
