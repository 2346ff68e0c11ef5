"""Commands and options that measure: validate and test, bench, profiles, the model card."""

from __future__ import annotations

import csv
import gzip
import json
import shlex
from pathlib import Path

import pytest
import torch
from cli_runs import in_own_process, tiny, write_corpus

from mutransformer.cli import main
from mutransformer.data.datamodule import TextDataModule

QUIET = ("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 20 steps, three of them profiled."""
    root = tmp_path_factory.mktemp("finished")
    options = ["--trainer.max_steps=20", "--profile_steps=3:5", "--data.test_fraction=0.2"]
    assert main(["fit", *tiny(corpus, root, *options)]) == 0
    return root / "version_0"


def checkpoint_of(folder: Path) -> str:
    return f"--ckpt_path={folder / 'checkpoints/last.ckpt'}"


def evaluations(folder: Path) -> list[dict[str, str]]:
    with (folder / "evaluations.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# Losses


@pytest.mark.parametrize("command", ["validate", "test"])
def test_a_loss_is_that_of_the_whole_split_at_any_batch_size(command, finished, corpus, capsys):
    (finished / "evaluations.csv").unlink(missing_ok=True)
    data = TextDataModule(
        dataset="text", data_files=corpus, validation_fraction=0.2, test_fraction=0.2, sequence_len=32
    )
    n_windows = data.windows("validation" if command == "validate" else "test").n_windows
    sizes = [1, 11, 16, n_windows + 5]  # windows; 11 and 16 leave an incomplete batch
    assert n_windows % 11 and n_windows % 16
    for n_rows in sizes:
        assert main([command, checkpoint_of(finished), *QUIET, f"--data.tokens_per_batch={32 * n_rows}"]) == 0
    rows = evaluations(finished)
    assert {row["command"] for row in rows} == {command} and {row["step"] for row in rows} == {"20"}
    assert [int(row["n_targets"]) for row in rows] == [32 * n_windows] * len(sizes)
    for name in ("loss", "perplexity", "bits_per_byte"):
        values = [float(row[name]) for row in rows]
        # float32 sums of up to 32 * n_windows losses, in other orders
        assert max(values) - min(values) < 1e-6 * max(values)
    said = capsys.readouterr().out
    assert f"{float(rows[0]['loss']):.4f} nats a token, perplexity " in said
    assert f"over {32 * n_windows:,} tokens" in said and f"written to {finished}/evaluations.csv" in said


def test_a_limit_is_a_number_of_windows(finished):
    """The same ones at any batch size, and others than all."""
    (finished / "evaluations.csv").unlink(missing_ok=True)
    for options in (["--limit=5"], ["--limit=5", "--data.tokens_per_batch=64"], []):
        assert main(["validate", checkpoint_of(finished), *QUIET, *options]) == 0
    first, second, whole = evaluations(finished)
    assert first["n_targets"] == second["n_targets"] == str(5 * 32)
    assert float(first["loss"]) == pytest.approx(float(second["loss"]), rel=1e-6)
    assert float(first["loss"]) != pytest.approx(float(whole["loss"]), rel=1e-4)


def test_a_limit_on_the_validations_of_a_fit_is_not_one_on_the_command(finished, tmp_path, capsys):
    config = tmp_path / "limited.yaml"
    config.write_text("trainer: {limit_val_batches: 1}")
    (finished / "evaluations.csv").unlink(missing_ok=True)
    for options in ([], ["--config", str(config)], ["--config", str(finished / "config.yaml")]):
        assert main(["validate", checkpoint_of(finished), *QUIET, *options]) == 0
    assert len({row["n_targets"] for row in evaluations(finished)}) == 1
    capsys.readouterr()
    for option, said in (("--trainer.limit_val_batches=1", "use --limit"), ("--limit=0", "must be at least 1")):
        assert main(["validate", checkpoint_of(finished), option]) == 2
        assert said in capsys.readouterr().err


def test_what_was_measured_is_said_even_where_it_cannot_be_written(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    (folder / "evaluations.csv").mkdir(parents=True)  # in the way, for root too
    (folder / "last.ckpt").symlink_to(finished / "checkpoints/last.ckpt")
    assert main(["validate", f"--ckpt_path={folder / 'last.ckpt'}", *QUIET]) == 0
    said = capsys.readouterr().out
    assert "nats a token" in said and "not written to evaluations.csv" in said


@pytest.mark.slow
def test_a_loss_is_that_of_the_whole_split_with_two_processes(finished):
    """83 windows leave an odd number for the last batch, of which one process gets a row that does not count."""
    (finished / "evaluations.csv").unlink(missing_ok=True)
    for n_devices, n_rows in ((1, 16), (2, 22), (2, 10)):
        options = [f"--trainer.devices={n_devices}", "--trainer.strategy=ddp", f"--data.tokens_per_batch={32 * n_rows}"]
        for limit in ("84", "83"):
            process = in_own_process("test", checkpoint_of(finished), *QUIET, *options, f"--limit={limit}")
            out, error = process.communicate(timeout=240)
            assert process.returncode == 0, out + error
    rows = evaluations(finished)
    assert [row["n_targets"] for row in rows] == [str(32 * n) for n in (84, 83)] * 3
    for first, *others in (rows[::2], rows[1::2]):
        for other in others:
            assert float(other["loss"]) == pytest.approx(float(first["loss"]), rel=1e-6)


# Bench


def test_bench_times_the_steps_of_a_configuration_and_keeps_nothing(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    options = ["--warmup=2", "--steps=4", "--mfu_convention=palm"]
    assert main(["bench", *tiny(corpus, tmp_path / "runs", *options, "--format=json")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
    assert result["n_steps"] == 4 and result["tokens_per_step"] == 512 and result["data"] == "text"
    assert 0 < result["step_s_p10"] <= result["step_s_median"] <= result["step_s_p90"] < result["first_step_s"] * 100
    assert result["tokens_per_s"] == pytest.approx(512 / result["step_s_median"])
    n_layer, d_model, vocab, length = 2, 32, 384, 32
    weights = 12 * n_layer * d_model**2 + vocab * d_model
    assert result["flops_per_token"] == 6 * weights + 12 * n_layer * d_model * length
    assert result["tflops_per_s"] == pytest.approx(result["tokens_per_s"] * result["flops_per_token"] / 1e12)
    assert result["mfu"] is None and result["peak_flops_per_s"] is None  # of a CPU no peak is known
    assert (result["n_compilations"], result["compile_s"]) == (0, 0)
    assert 1e8 < result["peak_memory_bytes"] < 1e11


def test_bench_with_random_tokens_reads_no_text(tmp_path, capsys):
    options = tiny(str(tmp_path / "nothing" / "*.txt"), tmp_path / "runs", "--warmup=0", "--steps=1", "--synthetic")
    assert main(["bench", *options]) == 0
    said = capsys.readouterr().out
    assert "random tokens, 512 tokens a step" in said and "over 1 steps" in said
    assert main(["bench", *[option for option in options if option != "--synthetic"]]) == 2


@pytest.mark.slow
def test_bench_counts_compilations(corpus, tmp_path, capsys):
    assert main(["bench", *tiny(corpus, tmp_path, "--model.compile=true", "--steps=2", "--format=json")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["n_compilations"] >= 1
    assert 0 < result["compile_s"] < result["first_step_s"]


# Profiles


def test_a_profile_is_a_trace_of_the_steps_asked_for(finished):
    """In the form that Perfetto reads: Chrome's trace events, with names, times and durations."""
    with gzip.open(finished / "trace_3_5.json.gz") as file:
        events = json.load(file)["traceEvents"]
    done = [event for event in events if event.get("ph") == "X"]
    assert all(event["dur"] >= 0 and event["ts"] > 0 and "tid" in event for event in done)
    n_updates = sum(event["name"] == "Optimizer.step#AdamW.step" for event in done)
    assert n_updates == 3
    products = ("aten::mm", "mkldnn::_linear_pointwise")  # torch's own, and oneDNN's on x86
    assert any(event["name"].startswith(products) for event in done)


# What a fit ends with


def test_the_model_card_says_what_the_run_was(finished, corpus):
    card = (finished / "README.md").read_text()
    with (finished / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name in ("train_loss", "val_loss"):
        newest = [float(row[name]) for row in rows if row[name]][-1]
        assert f"{newest:.4f} nats a token" in card
    counted = sum(
        tensor.numel()
        for name, tensor in torch.load(finished / "checkpoints/last.ckpt")["state_dict"].items()
        if name.startswith("decoder.")
    )
    assert f"{counted:,} parameters" in card and "20 optimizer steps" in card and f"| {20 * 512:,} |" in card
    assert "2 x 32, 2 heads of 16" in card and f"torch {torch.__version__}" in card
    command = next(line for line in card.splitlines() if line.startswith("mutransformer fit"))
    assert f"--data.data_files={corpus}" in shlex.split(command)


def test_the_config_of_a_run_is_read_by_other_commands(finished, capsys):
    assert main(["describe", "--config", str(finished / "config.yaml")]) == 0
    assert "w_query" in capsys.readouterr().out
