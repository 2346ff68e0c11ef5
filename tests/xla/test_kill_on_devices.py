"""kill -9 at any moment of a run on XLA devices: the next one goes on from a whole checkpoint, to the same bits."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import on_devices
import pytest
import torch
from cli_runs import write_corpus

from mutransformer.training.checkpoint import checkpoints_in, load_plain
from mutransformer.xla import shards

OPTIONS = (
    "--data.dataset=text", "--data.validation_fraction=0.2", "--data.sequence_len=32", "--data.tokens_per_batch=512",
    "--model.decoder.d_model=32", "--model.decoder.d_head=8", "--model.decoder.n_layer=2", "--trainer.max_steps=60",
    "--trainer.val_check_interval=20", "--trainer.enable_progress_bar=false", "--checkpoint.every_n_steps=1",
    "--trainer.accelerator=xla", "--trainer.strategy.mesh_rows=4", "--trainer.strategy.mesh_cols=2",
)  # fmt: skip
N_KILLS = 4


def start(corpus, root, *more):
    argv = [sys.executable, "-m", "mutransformer.cli", "fit", *OPTIONS, *more]
    argv += [f"--data.data_files={corpus}", f"--trainer.default_root_dir={root}"]
    return subprocess.Popen(
        argv, env=on_devices.environment(8), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def folder_of(root):
    return root / "version_0" / "checkpoints"


def whole_checkpoints(root):
    """Without one that is being written, as the first is at first: a run killed then has nothing to go on from."""
    return {path for path in checkpoints_in(str(folder_of(root))).values() if shards.is_sharded(path)}


@pytest.mark.slow
def test_killed_again_and_again(tmp_path):
    corpus = write_corpus(tmp_path)
    undisturbed, root = tmp_path / "undisturbed", tmp_path / "killed"
    process = start(corpus, undisturbed)
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said

    draw, n_killed = random.Random(0), 0
    while n_killed < N_KILLS:
        before = whole_checkpoints(root)
        process = start(corpus, root, "--resume=auto")
        deadline = time.monotonic() + 300
        # some steps further than last time, then at any moment of a step or of the write of a checkpoint
        while whole_checkpoints(root) <= before and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.4))
        process.kill()
        process.communicate()
        n_killed += 1
    process = start(corpus, root, "--resume=auto")
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said

    ours, theirs = (load_plain(f"{folder_of(path)}/step_00000060.ckpt") for path in (root, undisturbed))
    assert ours["global_step"] == 60
    for a, b in ((ours["state_dict"], theirs["state_dict"]), *states(ours, theirs)):
        assert a.keys() == b.keys() and a
        assert all(torch.equal(value, b[name]) for name, value in a.items())
    assert [path.name for path in root.iterdir()] == ["version_0"]


def states(ours, theirs):
    a, b = (checkpoint["optimizer_states"][0]["state"] for checkpoint in (ours, theirs))
    return [(a[i], b[i]) for i in a]
