from __future__ import annotations

import math
from pathlib import Path
from threading import Event, Timer

import pytest
import torch
from helpers import Batches, fit, make_module, make_trainer, random_batch
from lightning.fabric.plugins import CheckpointIO

from mutransformer.errors import ConfigError, SaveError
from mutransformer.training.checkpoint import (
    AtomicCheckpointIO,
    BackgroundCheckpointIO,
    checkpoints_in,
    newest_readable,
)
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


def run(folder, losses, every_n_validation=1, n_steps=5, **options):
    """Trains with these validation losses; returns the callback and the names that are left."""
    checkpoint = RunCheckpoint(**options)
    validation = {"val_check_interval": every_n_validation, "check_val_every_n_epoch": None}
    trainer = make_trainer(folder, n_steps, (Metrics(), checkpoint), **validation)
    batches = (BATCHES * 2)[:n_steps]
    trainer.fit(WithValidationLosses(losses), Batches(*batches), Batches(BATCHES[5]))
    return checkpoint, sorted(path.name for path in (folder / "version_0" / "checkpoints").iterdir())


def steps(*numbers: int) -> list[str]:
    return [f"step_{number:08d}.ckpt" for number in numbers]


LOSSES = [3.0, math.nan, 1.0, 2.0, 1.0]


@pytest.mark.parametrize(
    ("options", "kept", "best"),
    [
        ({"every_n_steps": 2}, [3, 5], 3),
        ({"every_n_steps": 2, "save_best": False}, [5], None),
        ({"every_n_steps": 2, "keep_last": 3}, [3, 4, 5], 3),
        ({"every_n_steps": 2, "keep_every": 2}, [2, 3, 4, 5], 3),
        ({"every_n_steps": 0}, [3, 5], 3),
        ({"every_n_steps": 0, "save_best": False}, [5], None),
        ({"every_n_steps": 0, "save_best": False, "keep_every": 2}, [2, 4, 5], None),
    ],
)
def test_which_checkpoints_are_kept(options, kept, best, tmp_path):
    checkpoint, names = run(tmp_path, LOSSES, **options)
    folder = tmp_path / "version_0" / "checkpoints"
    links = {"last.ckpt": steps(5)[0], **({"best.ckpt": steps(best)[0]} if best else {})}
    assert names == sorted([*links, *steps(*kept)])
    assert {name: str((folder / name).readlink()) for name in links} == links
    assert checkpoint.last_path == str(folder / steps(5)[0])
    for step in kept:
        saved = torch.load(folder / steps(step)[0])
        assert saved["global_step"] == step
    if best:
        state = saved["callbacks"]["RunCheckpoint"]
        assert (state["best_loss"], state["best_step"]) == (1.0, 3)


def test_one_is_written_every_n_steps_after_each_validation_and_at_the_end(tmp_path, monkeypatch):
    written = []
    save = AtomicCheckpointIO.save_checkpoint

    def watch(self, checkpoint, path, storage_options=None):
        written.append(checkpoint["global_step"])
        save(self, checkpoint, path, storage_options)

    monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", watch)
    run(tmp_path, [3.0, 2.0, 1.0], every_n_validation=4, n_steps=9, every_n_steps=3)
    assert written == [3, 4, 6, 8, 9]


class Folders(CheckpointIO):
    """Checkpoints that are folders, as those of a sharded model; notes what is complete when another is begun."""

    def __init__(self) -> None:
        self.complete_before: list[list[str]] = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        folder = Path(path)
        self.complete_before.append(sorted(shard.parent.name for shard in folder.parent.glob("step_*/shard")))
        folder.mkdir(parents=True)
        (folder / "shard").write_text("weights")

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        raise NotImplementedError

    def remove_checkpoint(self, path):
        (Path(path) / "shard").unlink()
        Path(path).rmdir()


def test_a_checkpoint_may_be_a_folder_and_an_older_one_goes_when_a_newer_is_complete(tmp_path):
    engine, checkpoint = Folders(), RunCheckpoint(every_n_steps=1)
    trainer = make_trainer(tmp_path, 4, (Metrics(), checkpoint), val_check_interval=2, plugins=[engine])
    trainer.fit(WithValidationLosses([1.0, 2.0]), Batches(*BATCHES), Batches(BATCHES[5]))
    assert engine.complete_before == [[], steps(1), steps(2), steps(2, 3)]
    folder = tmp_path / "version_0" / "checkpoints"
    assert sorted(path.name for path in folder.glob("step_*")) == steps(2, 4)
    assert (folder / "best.ckpt" / "shard").read_text() == "weights"


def test_the_best_so_far_goes_when_the_new_best_is_complete(tmp_path):
    class Slow(BackgroundCheckpointIO):
        is_writing = True  # until it is waited for

    engine, checkpoint = Folders(), RunCheckpoint(every_n_steps=1)
    trainer = make_trainer(tmp_path, 4, (Metrics(), checkpoint), val_check_interval=2, plugins=[Slow(engine)])
    trainer.fit(WithValidationLosses([2.0, 1.0]), Batches(*BATCHES), Batches(BATCHES[5]))
    assert engine.complete_before == [[], steps(1), steps(2), steps(2, 3)]
    assert sorted(path.name for path in Path(checkpoint.dirpath).glob("step_*")) == steps(4)


def test_a_write_that_fails_ends_the_run_and_leaves_what_was_there(tmp_path, monkeypatch):
    class Full(AtomicCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            if checkpoint["global_step"] == 4:
                raise SaveError("the disk is full")
            super().save_checkpoint(checkpoint, path, storage_options)

    checkpoint = RunCheckpoint(every_n_steps=2)
    plugins = [BackgroundCheckpointIO(Full())]
    with pytest.raises(SaveError, match="the disk is full"):
        fit(make_module(), tmp_path, BATCHES, callbacks=(checkpoint,), plugins=plugins)
    assert list(checkpoints_in(checkpoint.dirpath)) == [2]
    assert checkpoint.last_path.endswith(steps(2)[0])


def test_one_that_cannot_be_removed_stops_no_training(tmp_path):
    class Stubborn(AtomicCheckpointIO):
        def remove_checkpoint(self, path):
            raise OSError("not allowed")

    checkpoint = RunCheckpoint(every_n_steps=2)
    with pytest.warns(UserWarning, match="could not be removed"):
        trainer = fit(make_module(), tmp_path, BATCHES[:4], callbacks=(checkpoint,), plugins=[Stubborn()])
    assert trainer.global_step == 4


def test_the_best_loss_is_remembered_by_a_resumed_run(tmp_path):
    checkpoint = RunCheckpoint()
    checkpoint.load_state_dict({"best_loss": 0.0, "best_step": 7})
    trainer = make_trainer(tmp_path, 1, (Metrics(), checkpoint), val_check_interval=1)
    trainer.fit(make_module(), Batches(BATCHES[0]), Batches(BATCHES[5]))
    names = sorted(path.name for path in (tmp_path / "version_0" / "checkpoints").iterdir())
    assert names == ["last.ckpt", *steps(1)]


def test_a_run_that_goes_on_in_its_folder_keeps_the_best_and_clears_away_what_was_left_half_written(tmp_path):
    first, _ = run(tmp_path, [1.0, 2.0], n_steps=2, every_n_steps=1)
    folder = Path(first.dirpath)
    (folder / ".step_00000009.ckpt.tmp").write_bytes(b"half of it")
    again = RunCheckpoint(every_n_steps=1, dirpath=str(folder))
    trainer = make_trainer(tmp_path, 3, (Metrics(), again), val_check_interval=1)
    module = WithValidationLosses([3.0])
    trainer.fit(module, Batches(*BATCHES[:2]), Batches(BATCHES[5]), ckpt_path=first.last_path)
    assert sorted(path.name for path in folder.iterdir()) == ["best.ckpt", "last.ckpt", *steps(1, 3)]


@pytest.mark.parametrize(("name", "value"), [("every_n_steps", -1), ("keep_every", -1), ("keep_last", 0)])
def test_a_number_out_of_range_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"^checkpoint.{name}={value}: must"):
        RunCheckpoint(**{name: value})


# In the background


class Held(AtomicCheckpointIO):
    """Writes when it is let."""

    def __init__(self) -> None:
        self.may_write = Event()

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        assert self.may_write.wait(30)
        super().save_checkpoint(checkpoint, path, storage_options)


def test_what_is_written_is_what_was_there_when_it_was_begun(tmp_path):
    held, weights = Held(), torch.ones(3)
    background = BackgroundCheckpointIO(held)
    background.save_checkpoint({"weights": {"a": weights}}, tmp_path / "a.ckpt")
    weights.zero_()  # as the next step does
    assert background.is_writing and not list(tmp_path.iterdir())
    held.may_write.set()
    background.wait()
    assert not background.is_writing
    assert torch.equal(torch.load(tmp_path / "a.ckpt")["weights"]["a"], torch.ones(3))


def test_the_next_write_waits_for_the_one_before(tmp_path):
    held = Held()
    background = BackgroundCheckpointIO(held)
    background.save_checkpoint({"step": 1}, tmp_path / "1.ckpt")
    Timer(0.2, held.may_write.set).start()
    background.save_checkpoint({"step": 2}, tmp_path / "2.ckpt")
    assert (tmp_path / "1.ckpt").is_file()
    assert background.load_checkpoint(tmp_path / "2.ckpt") == {"step": 2}


def test_an_error_in_the_background_is_raised_once_by_whoever_comes_next(tmp_path):
    (tmp_path / "file").write_text("no folder")
    background = BackgroundCheckpointIO(AtomicCheckpointIO())
    background.save_checkpoint({"step": 1}, tmp_path / "file" / "1.ckpt")
    with pytest.raises(SaveError, match=r"1\.ckpt could not be written \(.*Not a directory|File exists"):
        background.save_checkpoint({"step": 2}, tmp_path / "2.ckpt")
    background.wait()
    background.teardown()


def test_a_run_ends_when_its_last_checkpoint_is_there(tmp_path):
    checkpoint, background = RunCheckpoint(every_n_steps=0), BackgroundCheckpointIO(AtomicCheckpointIO())
    fit(make_module(), tmp_path, BATCHES[:3], callbacks=(checkpoint,), plugins=[background])
    assert torch.load(checkpoint.last_path)["global_step"] == 3


# Finding them


def test_checkpoints_are_found_in_order_of_steps(tmp_path):
    for name in ("step_9.ckpt", "step_00000010.ckpt", ".step_00000011.ckpt.tmp", "last.ckpt", "step_x.ckpt"):
        (tmp_path / name).write_text("")
    assert list(checkpoints_in(str(tmp_path)).items()) == [
        (9, f"{tmp_path}/step_9.ckpt"),
        (10, f"{tmp_path}/step_00000010.ckpt"),
    ]
    assert checkpoints_in(str(tmp_path / "nowhere")) == {}


def test_the_newest_that_can_be_read_is_found_and_the_others_named(tmp_path):
    checkpoint, _ = run(tmp_path, [1.0, 2.0], n_steps=2, every_n_steps=1, keep_last=2)
    broken = Path(checkpoint.dirpath) / steps(3)[0]
    broken.write_bytes(b"half of it")
    path, errors = newest_readable(checkpoint.dirpath)
    assert path == checkpoint.last_path
    assert len(errors) == 1 and str(broken) in str(errors[0])
    assert newest_readable(str(tmp_path)) == (None, [])
