"""Folders of shards, by plain torch: any host's parts are a dictionary of tensors."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from helpers import normal

from mutransformer.errors import SaveError
from mutransformer.training.checkpoint import AtomicCheckpointIO, remove_unfinished
from mutransformer.xla import shards
from mutransformer.xla.shards import DamagedCheckpointError, HostShards


def cut(whole, rows, cols, n_replicas=1):
    """As a mesh of rows by cols holds it, each part `n_replicas` times."""
    found = []
    for i, block in enumerate(whole.chunk(rows, 0)):
        for j, part in enumerate(block.chunk(cols, 1)):
            where = tuple(slice(k * n, (k + 1) * n) for k, n in zip((i, j), part.shape, strict=True))
            found += [(part.clone(), where)] * n_replicas
    return HostShards.of(whole, found)


def checkpoint(step=3, seed=0):
    a, b = normal(8, 6, seed=seed), normal(4, 4, seed=seed + 1, dtype=torch.float32)
    tree = {
        "global_step": step,
        "state_dict": {"decoder.w.a": cut(a, 4, 2), "decoder.b": cut(b, 2, 1, n_replicas=4)},
        "optimizer_states": [{"state": {0: {"exp_avg": cut(a * 2, 4, 2), "step": torch.tensor(3.0)}}}],
        "words": ["kept", 1.5, None],
    }
    return tree, a, b


def test_reads_back_whole_and_in_other_parts(tmp_path):
    tree, a, b = checkpoint()
    shards.save(tree, tmp_path / "last.ckpt", "step-3")
    found = shards.load(tmp_path / "last.ckpt")
    assert torch.equal(found["state_dict"]["decoder.w.a"], a)
    assert torch.equal(found["state_dict"]["decoder.b"], b)  # replicated in part: the stock planner loses such tensors
    state = found["optimizer_states"][0]["state"][0]
    assert torch.equal(state["exp_avg"], a * 2)
    assert (state["step"], found["words"], found["global_step"]) == (3.0, ["kept", 1.5, None], 3)

    target = cut(torch.zeros_like(a), 2, 3)
    assert shards.load(tmp_path / "last.ckpt", into={"state_dict/decoder.w.a": target})["words"] == tree["words"]
    assert torch.equal(target.parts[4, 2], a[4:8, 2:4])


def test_bfloat16_and_values_that_are_not_numbers_keep_their_bits(tmp_path):
    whole = torch.tensor([[1.0, float("nan")], [float("inf"), -0.0]], dtype=torch.bfloat16)
    shards.save({"x": cut(whole, 2, 1)}, tmp_path / "c", "step-1")
    found = shards.load(tmp_path / "c")["x"]
    assert torch.equal(found.view(torch.int16), whole.view(torch.int16))


def test_newer_state_replaces_the_older_one_once_it_is_whole(tmp_path):
    shards.save(checkpoint(1)[0], tmp_path / "c", "step-1")
    shards.save(checkpoint(2)[0], tmp_path / "c", "step-2")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["current", "step-2"]
    shards.save(checkpoint(2, seed=9)[0], tmp_path / "c", "step-2")
    assert (tmp_path / "c" / "current").read_text() == "step-2-again"
    assert torch.equal(shards.load(tmp_path / "c")["state_dict"]["decoder.w.a"], checkpoint(2, seed=9)[1])


@pytest.mark.parametrize("last_step", ["_save_state_dict", "verify", "_point_to"])
def test_a_failure_at_any_step_leaves_the_older_state(tmp_path, monkeypatch, last_step):
    io = AtomicCheckpointIO()
    io.save_checkpoint(checkpoint(1)[0], tmp_path / "c")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shards, last_step, full)
        with pytest.raises(
            SaveError, match=r"could not be written .*No space left on device.*; what was there is intact"
        ):
            io.save_checkpoint(checkpoint(2, seed=5)[0], tmp_path / "c")
    assert torch.equal(io.load_checkpoint(tmp_path / "c")["state_dict"]["decoder.w.a"], checkpoint(1)[1])
    io.save_checkpoint(checkpoint(2, seed=5)[0], tmp_path / "c")  # over what the failure left
    assert io.load_checkpoint(tmp_path / "c")["global_step"] == 2


def test_what_was_not_written_as_it_is_in_memory_is_found(tmp_path):
    tree, a, _ = checkpoint()
    shards.save(tree, tmp_path / "c", "step-3")
    key, state = "state_dict/decoder.w.a", str(tmp_path / "c" / "step-3")
    shards.verify(state, {key: cut(a, 4, 2)})
    other = a.clone()
    other[7, 5] += 1
    for tensors, words in (
        ({key: cut(other, 4, 2)}, "reads back otherwise than it was written"),
        ({key: cut(a[:4], 4, 2)}, "is missing or has another shape"),
        ({"state_dict/lost": cut(a, 4, 2)}, "is missing or has another shape"),
    ):
        with pytest.raises(DamagedCheckpointError, match=words):
            shards.verify(state, tensors)


def cut_short(file):
    file.write_bytes(file.read_bytes()[:-1])


def overwritten(file):
    file.write_bytes(bytes(file.stat().st_size))


@pytest.mark.parametrize(
    "damage, message",
    [(Path.unlink, "is missing"), (cut_short, "is cut short"), (overwritten, "cannot be read")],
)
def test_a_damaged_file_is_found_when_it_is_read(damage, message, tmp_path):
    tree, a, _ = checkpoint()
    shards.save(tree, tmp_path / "c", "step-3")
    for file in (tmp_path / "c" / "step-3").glob("*.distcp"):
        damage(file)
    into = {"state_dict/decoder.w.a": cut(torch.zeros_like(a), 2, 3)}
    for wanted in (None, into):
        with pytest.raises(DamagedCheckpointError, match=message):
            shards.load(tmp_path / "c", into=wanted)


def test_parts_that_do_not_make_the_whole_are_found(tmp_path):
    tree = checkpoint()[0]
    del tree["state_dict"]["decoder.w.a"].parts[2, 0]
    with pytest.raises(DamagedCheckpointError, match=r"state_dict/decoder.w.a has 42 of 48 values"):
        shards.save(tree, tmp_path / "c", "step-3")
    assert not shards.is_sharded(tmp_path / "c")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        shards.load(tmp_path / "c")


def test_a_file_and_a_folder_of_one_name_replace_each_other(tmp_path):
    io, path = AtomicCheckpointIO(), tmp_path / "step_00000003.ckpt"
    io.save_checkpoint({"global_step": 3, "by": "file"}, path)
    for _ in range(2):
        io.save_checkpoint({**checkpoint(3)[0], "by": "folder"}, path)
        assert (path.is_dir(), io.load_checkpoint(path)["by"]) == (True, "folder")
        io.save_checkpoint({"global_step": 3, "by": "file"}, path)
        assert (path.is_dir(), io.load_checkpoint(path)["by"]) == (False, "file")
    assert [child.name for child in tmp_path.iterdir()] == [path.name]


def test_what_stepped_aside_comes_back_and_what_was_not_finished_goes(tmp_path):
    io = AtomicCheckpointIO()
    io.save_checkpoint({"global_step": 3}, tmp_path / ".step_00000003.ckpt.old")
    io.save_checkpoint(checkpoint(4)[0], tmp_path / "step_00000004.ckpt")
    io.save_checkpoint(checkpoint(5)[0], tmp_path / "step_00000005.ckpt")
    shards.invalidate(tmp_path / "step_00000005.ckpt")  # as an interrupted removal leaves it
    io.save_checkpoint(checkpoint(6)[0], tmp_path / ".step_00000006.ckpt.tmp")
    (tmp_path / "step_00000007.ckpt").mkdir()
    (tmp_path / "step_00000007.ckpt" / "of another engine").write_text("kept")
    remove_unfinished(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_0000000{n}.ckpt" for n in (3, 4, 7)]


def in_a_group(rank, folder, port, fails):
    """One of two hosts: each has the rows of one half, and both have what is not cut."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tree = checkpoint()[0]
    shards_of_a = tree["state_dict"]["decoder.w.a"]
    shards_of_a.parts = {at: part for at, part in shards_of_a.parts.items() if (at[0] >= 4) == (rank == 1)}
    del tree["optimizer_states"]
    if fails and rank == 1:
        shards.verify = lambda *args: (_ for _ in ()).throw(OSError("no space"))
    try:
        AtomicCheckpointIO().save_checkpoint(tree, f"{folder}/c")
    except SaveError as error:
        Path(folder, f"error-{rank}").write_text(str(error))
    finally:
        torch.distributed.destroy_process_group()  # its threads must not outlive the interpreter


@pytest.mark.parametrize("fails", [False, True])
def test_two_hosts_write_one_checkpoint_and_an_error_of_one_is_that_of_both(tmp_path, fails):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(in_a_group, (str(tmp_path), port, fails), nprocs=2)
    errors = {path.name: path.read_text() for path in tmp_path.glob("error-*")}
    if fails:
        assert "no space" in errors["error-1"] and "another host: no space" in errors["error-0"]
        assert not shards.is_sharded(tmp_path / "c")
    else:
        assert errors == {}
        _, a, b = checkpoint()
        found = shards.load(tmp_path / "c")
        assert torch.equal(found["state_dict"]["decoder.w.a"], a)
        assert torch.equal(found["state_dict"]["decoder.b"], b)
