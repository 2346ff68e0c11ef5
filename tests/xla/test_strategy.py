"""Sharding, compilations and checkpoints of runs on XLA devices."""

from __future__ import annotations

import csv
from pathlib import Path

import cases
import on_devices
import pytest
import torch

from mutransformer.cli import main
from mutransformer.training.checkpoint import load_plain

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("mesh", [[4, 2], [2, 4]], ids=str)
def test_memory_of_a_device_is_a_share_of_all_that_the_table_cuts(mesh):
    found = on_devices.run(8, "memory", mesh=mesh, variant="gqa")
    n_devices, cols = mesh[0] * mesh[1], mesh[1]
    share = {
        **dict.fromkeys(("w_query", "w_key", "w_value", "w_attention_out", "w_ff_in", "w_ff_out"), n_devices),
        **dict.fromkeys(("embedding", "unembedding", "gain_attention", "gain_feedforward", "gain_final"), cols),
        **dict.fromkeys(("gain_query", "gain_key"), 1),
    }
    buffers = ("", ".exp_avg", ".exp_avg_sq")
    assert found.keys() == {f"{name}{buffer}" for name in share for buffer in buffers}
    for key, (whole, on_device) in found.items():
        assert on_device * share[key.split(".")[0]] == whole, key


def test_a_tensor_that_is_not_cut_as_the_table_says_is_an_error():
    message = on_devices.run(8, "wrong_sharding", mesh=[4, 2])
    assert message == "w_ff_in: a device holds [2, 128, 16] of [2, 256, 64], the table says [2, 256, 64]"


def test_a_mark_that_is_not_in_the_graph_is_an_error():
    assert on_devices.run(8, "lost_mark", mesh=[4, 2]) == [
        "",
        "a tensor marked (None, None, 'X', None) has no such mark in the graph of the step",
    ]


def test_three_graphs_whatever_lightning_does_beside():
    found = on_devices.run(8, "everything_on", mesh=[4, 2])
    assert found["n_steps"] == 18
    assert found["n_by_kind"] == {"training": 1, "validation": 1}
    assert found["n_in_all"] == 3  # and one that makes the optimizer's state
    assert found["warnings"] == []
    assert found["fallbacks"] == {}
    assert "last.ckpt" in found["checkpoints"]
    assert found["n_rows"] > 18


def test_a_number_in_the_graph_is_caught_and_named():
    first, second, *_ = on_devices.run(8, "planted_number", mesh=[4, 2])
    assert first.startswith("a training step was compiled again: its batch has the same shapes")
    assert second.startswith("the graph of the training step is not that of the first one: -")
    assert second.endswith("- %constant = s64[] constant(31); + %constant = s64[] constant(29)")


def test_an_odd_batch_is_caught_with_its_shape():
    (message,) = on_devices.run(8, "odd_batch", mesh=[4, 2])
    assert message == (
        "a training step was compiled again: batch['tokens'] is int64 [16, 17], before it was int64 [32, 17]"
    )


def test_a_last_batch_of_any_size_counts_and_has_the_graph_of_the_others():
    found, plain = on_devices.run(8, "evaluate", mesh=[4, 2]), cases.evaluate(None)
    assert found["n"] == {"test": 1}
    assert found["n_targets"] == plain["n_targets"] == (2 * cases.N_ROWS + 5) * cases.LENGTH
    assert found["loss"] == pytest.approx(plain["loss"], abs=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def runs(folder):
    cases.resume(None, None, 3, f"{folder}/plain.ckpt")
    return on_devices.run(8, "resumed_everywhere", folder=str(folder))


def tensors(checkpoint):
    state = checkpoint["optimizer_states"][0]["state"]
    buffers = {f"{i}.{name}": value for i, buffers in state.items() for name, value in buffers.items()}
    return {**checkpoint["state_dict"], **buffers}


def test_resumed_run_equals_the_whole_one_to_the_bit(runs, folder):
    assert torch.equal(runs["whole"]["loss"], torch.cat([runs["half"]["loss"], runs["resumed"]["loss"]]))
    whole, resumed = (load_plain(folder / f"{name}.ckpt") for name in ("whole", "resumed"))
    assert tensors(whole).keys() == tensors(resumed).keys()
    assert all(torch.equal(value, tensors(resumed)[name]) for name, value in tensors(whole).items())


def test_same_run_twice_gives_the_same_bits(runs):
    again = on_devices.run(8, "resume", mesh=[4, 2], checkpoint=None, n_steps=cases.N_STEPS, save=None)
    assert torch.equal(again["loss"], runs["whole"]["loss"])
    assert torch.equal(again["grad_norm"], runs["whole"]["grad_norm"])


def test_goes_on_on_another_mesh_and_from_a_plain_file(runs):
    for name in ("on (8, 1)", "from a file"):
        assert torch.allclose(runs[name]["loss"], runs["whole"]["loss"][3:], rtol=0, atol=1e-6), name


def test_goes_on_in_plain_torch(runs, folder):
    found = cases.resume(None, f"{folder}/half.ckpt", cases.N_STEPS, None)
    assert torch.allclose(found["loss"], runs["whole"]["loss"][3:], rtol=0, atol=1e-6)


def test_consolidated_folder_is_the_same_checkpoint(runs, folder, capsys):
    assert main(["checkpoint", "consolidate", f"{folder}/half.ckpt", f"{folder}/one.ckpt"]) == 0
    assert "one.ckpt: step 3, " in capsys.readouterr().out
    parts, whole = load_plain(folder / "half.ckpt"), torch.load(folder / "one.ckpt", weights_only=True)
    assert all(torch.equal(value, tensors(whole)[name]) for name, value in tensors(parts).items())
    assert main(["checkpoint", "consolidate", f"{folder}/half.ckpt", f"{folder}/one.ckpt"]) == 2
    assert "one.ckpt': is there already; give a new name" in capsys.readouterr().err
    assert main(["checkpoint", "consolidate", f"{folder}/none.ckpt", f"{folder}/two.ckpt"]) == 2
    assert main(["checkpoint", "merge"]) == 2


@pytest.mark.slow
def test_coordinate_check_finds_the_same_numbers(tmp_path):
    options = [
        "--config", str(CONFIGS / "coordcheck.yaml"), "--model.decoder.d_head=8", "--widths=[32,64,128]",
        "--seeds=[1,2]", "--steps=3",
    ]  # fmt: skip
    on_cpu = main(["coordcheck", *options, f"--out={tmp_path}/cpu"])
    mesh = ["--trainer.accelerator=xla", "--trainer.strategy.mesh_rows=4", "--trainer.strategy.mesh_cols=2"]
    argv = ["coordcheck", *options, *mesh, f"--out={tmp_path}/xla"]
    assert on_devices.run(8, "command", argv=argv) == on_cpu
    found, wanted = (read(tmp_path / name / "coordcheck.csv") for name in ("xla", "cpu"))
    assert found.keys() == wanted.keys() and len(wanted) > 1000
    # Adam's first steps divide by gradients that rounding has touched
    off = [key for key, value in wanted.items() if abs(found[key] - value) > 1e-3 * abs(value) + 1e-7]
    assert off == []


def read(path):
    with path.open() as file:
        return {tuple(v for k, v in row.items() if k != "value"): float(row["value"]) for row in csv.DictReader(file)}


def test_what_is_for_tpu_alone(tmp_path):
    refused, warned = on_devices.run(8, "for_tpu", folder=str(tmp_path))
    assert refused == "trainer.strategy.flash_attention=True: runs on TPU, not on CPU devices; use false"
    (message,) = warned
    assert message.startswith("trainer.strategy.compilation_cache: CPU devices cannot read back what they compiled")
    assert list(tmp_path.iterdir()) == []


def test_describe_is_the_same(capsys):
    options = ["describe", "--config", str(CONFIGS / "small.yaml"), "--format=json"]
    assert main(options) == 0
    plain = capsys.readouterr().out
    assert main([*options, "--trainer.accelerator=xla"]) == 0
    assert capsys.readouterr().out == plain
