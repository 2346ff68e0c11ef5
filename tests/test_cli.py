"""The command line in this process: precedence, mistakes, describe, configs, what a run leaves behind."""

from __future__ import annotations

import csv
import json
import resource
from pathlib import Path

import pytest
import torch
import yaml
from cli_runs import assert_same_state, in_own_process, last_checkpoint, tiny, write_corpus

from mutransformer.cli import COMMANDS, main

CONFIGS = Path(__file__).parents[1] / "configs"
CHECKS = ("coordcheck", "transfer")  # their configs have options of the command's own
LADDER = {"small": 128, "medium": 512, "large": 2048, "huge": 8192}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def finished(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of 60 steps."""
    root = tmp_path_factory.mktemp("finished")
    assert main(["fit", *tiny(corpus, root)]) == 0
    return root / "version_0"


def described(capsys: pytest.CaptureFixture[str], *args: str) -> dict:
    assert main(["describe", *args, "--format=json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


def test_fit_leaves_a_run_folder(finished):
    names = {"checkpoints", "config.yaml", "loss.png", "metrics.csv", "README.md"}
    assert {path.name for path in finished.iterdir()} == names
    links = {path.name for path in (finished / "checkpoints").iterdir() if path.is_symlink()}
    assert links == {"last.ckpt", "best.ckpt"}
    with (finished / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows if row["train_loss"]] == list(range(5, 61, 5))
    losses = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_saved_config_is_complete_and_runs_again_to_the_same_bits(finished, tmp_path):
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert {"trainer", "model", "data", "checkpoint", "seed_everything"} <= config.keys()
    args = ["fit", "--config", str(finished / "config.yaml"), f"--trainer.default_root_dir={tmp_path}"]
    assert main(args) == 0
    assert_same_state(finished / "checkpoints/last.ckpt", last_checkpoint(tmp_path))


def test_another_seed_gives_other_weights(corpus, finished, tmp_path):
    assert main(["fit", *tiny(corpus, tmp_path, "--seed_everything=2", "--trainer.max_steps=15")]) == 0
    with pytest.raises(AssertionError):
        assert_same_state(finished / "checkpoints/last.ckpt", last_checkpoint(tmp_path))


def test_checkpoint_is_plain_and_tells_its_origin(finished):
    checkpoint = torch.load(finished / "checkpoints/last.ckpt", weights_only=True)
    origin = checkpoint["mutransformer"]
    assert origin["versions"]["torch"] == str(torch.__version__)
    assert origin["config"]["model"]["decoder"]["d_model"] == 32


def test_validate_needs_the_checkpoint_alone(finished, capsys):
    assert main(["validate", "--ckpt_path", str(finished / "checkpoints/last.ckpt"), "--trainer.accelerator=cpu"]) == 0
    with (finished / "metrics.csv").open() as file:
        last = [row["val_loss"] for row in csv.DictReader(file) if row["val_loss"]][-1]
    assert f"{float(last):.4f} nats" in capsys.readouterr().out


def test_typed_setting_that_contradicts_the_checkpoint_names_both(finished, corpus, tmp_path, capsys):
    checkpoint = f"--ckpt_path={finished / 'checkpoints/last.ckpt'}"
    contradictions = {
        "--model.decoder.d_model=64": "32",
        "--model.optimizer.learning_rate=0.5": "0.015625",
        "--trainer.gradient_clip_val=0.25": "0.5",
    }
    for option, saved in contradictions.items():
        assert main(["fit", *tiny(corpus, tmp_path, checkpoint, option)]) == 2
        error = capsys.readouterr().err
        name, value = option.lstrip("-").split("=")
        assert f"{name}={value}" in error and saved in error
    assert not list(tmp_path.iterdir())


def test_precedence_is_command_line_then_later_file_then_earlier_file_then_base(tmp_path, capsys):
    files = {
        "base.yaml": "model: {decoder: {d_model: 256, n_layer: 1, d_head: 32, ff_multiple: 2}}",
        "first.yaml": "base: base.yaml\nmodel: {decoder: {n_layer: 2, d_head: 64, ff_multiple: 3}}",
        "second.yaml": "model: {decoder: {d_head: 128, ff_multiple: 5}}",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command_line = "--model.decoder.ff_multiple=6"
    plan = described(
        capsys, command_line, "--config", str(tmp_path / "first.yaml"), f"--config={tmp_path / 'second.yaml'}"
    )
    shapes = {row["name"]: row["shape"] for row in plan["rows"]}
    assert shapes["w_query"] == [2, 2, 128, 256]
    assert shapes["w_ff_in"] == [2, 1536, 256]


@pytest.mark.parametrize("command", CHECKS)
def test_config_of_a_check_is_read_by_its_command(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--config", str(CONFIGS / f"{command}.yaml"), "--print_config"])
    shown, written = (
        yaml.safe_load(text) for text in (capsys.readouterr().out, (CONFIGS / f"{command}.yaml").read_text())
    )
    assert shown["widths"] == written["widths"] and shown["model"]["decoder"]["n_layer"] == 2


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml") if path.stem not in CHECKS))
def test_config_file_instantiates(name, capsys):
    below = (
        [] if name in ("base.yaml", *(f"{size}.yaml" for size in LADDER)) else ["--config", str(CONFIGS / "small.yaml")]
    )
    plan = described(capsys, *below, "--config", str(CONFIGS / name))
    assert plan["totals"]["count"] > 0
    header = (CONFIGS / name).read_text().split("\n\n")[0]
    assert header.startswith("#")


@pytest.mark.parametrize(("name", "width"), LADDER.items())
def test_ladder_changes_width_alone(name, width):
    tree = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert tree == {"base": "base.yaml", "model": {"decoder": {"d_model": width}}}


def test_paper_config_holds_the_settings_of_the_study(capsys):
    plan = described(capsys, "--config", str(CONFIGS / "medium.yaml"), "--config", str(CONFIGS / "paper.yaml"))
    rows = {row["name"]: row for row in plan["rows"]}
    assert rows["w_ff_in"]["shape"] == [24, 2048, 512]
    assert rows["w_query"]["lr"] == 2**-6 / 4 and rows["embedding"]["lr"] == 2**-6
    assert plan["totals"]["qk_scale"] == 1 / 128


def test_describe_formats_agree(capsys):
    plan = described(capsys)
    assert main(["describe", "--format=csv"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["name"] for row in rows] == [row["name"] for row in plan["rows"]]
    assert sum(int(row["count"]) for row in rows) == plan["totals"]["count"]
    assert main(["describe"]) == 0
    table = capsys.readouterr().out
    assert f"{plan['totals']['count']:,} parameters" in table


def test_fit_repeats_the_warnings_of_the_plan(corpus, tmp_path, capsys):
    assert main(["fit", *tiny(corpus, tmp_path, "--model.parametrization.rules=sp", "--trainer.max_steps=1")]) == 0
    assert "rules sp" in capsys.readouterr().err


def test_describe_warns_of_what_does_not_transfer(capsys):
    args = ["--model.decoder.norm_gains=vector", "--model.parametrization.n_base_layer=2", "--model.decoder.n_layer=8"]
    warnings = described(capsys, *args)["warnings"]
    assert any("norm_gains" in text for text in warnings) and any("n_base_layer" in text for text in warnings)
    assert described(capsys)["warnings"] == []


# arguments -> what the one line must hold
MISTAKES = {
    "unknown key": (["--model.decoder.d_modle=3"], "did you mean model.decoder.d_model?"),
    "type": (["--model.decoder.d_model=abc"], "model.decoder.d_model='abc'"),
    "choice": (["--model.decoder.activation=reluu"], "'relu'"),
    "linked": (["--model.schedule.total_steps=7"], "set trainer.max_steps"),
    "d_model": (["--model.decoder.d_model=100"], "d_head=64; use 64 or 128"),
    "odd d_head": (["--model.decoder.d_head=1"], "must be even"),
    "n_kv_head": (["--model.decoder.d_model=256", "--model.decoder.n_kv_head=3"], "n_head=4"),
    "zero layers": (["--model.decoder.n_layer=0"], "model.decoder.n_layer=0"),
    "negative size": (["--model.decoder.d_model=-64"], "model.decoder.d_model=-64"),
    "negative learning rate": (["--model.optimizer.learning_rate=-1"], "model.optimizer.learning_rate=-1"),
    "warm-up": (["--model.schedule.warmup_steps=2000"], "trainer.max_steps=1000"),
    "batch below a sequence": (["--data.tokens_per_batch=100"], "sequence_len=256"),
    "missing data": (["--data.dataset=text", "--data.data_files=/no/such/file"], "/no/such/file"),
    "run folder": (["--trainer.default_root_dir=/proc/no"], "cannot be written to"),
    "precision": (["--trainer.precision=16-true"], "bf16-mixed"),
    "accelerator": (["--trainer.accelerator=abacus"], "abacus"),
    "not a number": (["--model.optimizer.learning_rate=.nan"], "must be finite"),
    "infinite": (["--model.parametrization.qk_scale=.inf"], "must be finite"),
    "seed": (["--seed_everything=-1"], "seed_everything=-1"),
    "no seed": (["--seed_everything=true"], "seed_everything=True"),
    "validation interval": (["--trainer.val_check_interval=0"], "must be above zero"),
    "run folder on a store": (["--trainer.default_root_dir=gs://bucket/runs"], "must be a local folder"),
    "checkpoint folder": (["--checkpoint.dirpath=/proc/no"], "checkpoint.dirpath='/proc/no': cannot be written to"),
    "cache": ([f"--data.cache={__file__}"], "is a file; give a folder"),
    "no TPU": (["--trainer.accelerator=tpu"], "there is no TPU here; use xla"),
    "no weights": (["--init_from="], "init_from='': names no weights"),
    "a part of a seed": (["--seed_everything=1.5"], "give a value of type int"),
    "devices": (["--trainer.devices=-1", "--trainer.accelerator=cpu"], "trainer"),
    "micro-batches": (["--trainer.accumulate_grad_batches=1000"], "a batch has 32 sequences"),
    "large batch": (["--data.tokens_per_batch=256000000"], "data.tokens_per_batch"),
    "abbreviation": (["--model.optimizer.learning_r=1"], "model.optimizer.learning_rate"),
    "zero multiplier": (["--model.parametrization.output_multiplier=0"], "must be above zero"),
    "completep without a base": (["--model.parametrization.depth_rule=completep"], "n_base_layer"),
    "decay_steps": (["--model.schedule.decay_steps=5"], "use kind wsd"),
    "clip algorithm": (["--trainer.gradient_clip_algorithm=value"], "use norm"),
    "checkpoint interval": (["--checkpoint.every_n_steps=-1"], "checkpoint.every_n_steps=-1"),
    "no last checkpoint": (["--checkpoint.keep_last=0"], "checkpoint.keep_last=0"),
    "profiled steps": (["--profile_steps=20:10"], "profile_steps='20:10': must begin"),
    "profiled steps after the end": (["--profile_steps=10:2000"], "the run has trainer.max_steps=1000"),
    "profiled steps, form": (["--profile_steps=10"], "write 10:20"),
    "resume from two": (["--resume=auto", "--ckpt_path=a.ckpt"], "leave one of them out"),
    "resume": (["--resume=always"], "resume='always'"),
    "mfu": (["--mfu_convention=flops"], "'causal'"),
    "missing checkpoint": (["--ckpt_path=/no/such.ckpt"], "there is no such file"),
    "missing config": (["--config=/no/such.yaml"], "/no/such.yaml"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_one_line_and_exit_code_2(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args, expected = MISTAKES[name]
    assert main(["fit", *args]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.splitlines()) == 1 and "Traceback" not in error
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    "text", ["a: [b", "just text", "model: {decoder: {d_modle: 3}}", "base: nowhere.yaml", "model: [1]", "data:"]
)
def test_config_file_that_does_not_work_is_named(text, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert main(["fit", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "mine.yaml" in error or "d_modle" in error or "nowhere.yaml" in error


def test_unknown_command_suggests_the_nearest(capsys):
    assert main(["fot"]) == 2
    assert "did you mean fit?" in capsys.readouterr().err


def test_damaged_checkpoint_is_one_line(tmp_path, capsys):
    damaged = tmp_path / "damaged.ckpt"
    damaged.write_bytes(b"no checkpoint")
    assert main(["validate", f"--ckpt_path={damaged}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_debug_variable_brings_the_traceback():
    process = in_own_process("describe", "--model.decoder.d_model=100", env={"MUTRANSFORMER_DEBUG": "1"})
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" in error and "ConfigError" in error


def test_loss_that_is_not_finite_stops_with_step_and_checkpoint(corpus, tmp_path, capsys):
    fast = ["--model.optimizer.algorithm=sgd", "--model.optimizer.learning_rate=1e30", "--checkpoint.every_n_steps=1"]
    args = ["fit", *tiny(corpus, tmp_path, *fast, "--trainer.gradient_clip_val=null")]
    assert main(args) == 1
    error = capsys.readouterr().err
    assert "at step" in error and len(error.splitlines()) == 1
    checkpoints = list(tmp_path.rglob("last.ckpt"))
    for path in checkpoints:
        assert f"{path.parent}/{path.readlink()}" in error
        weights = torch.load(path, weights_only=True)["state_dict"]
        assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    assert main([*args, "--detect_nan=false"]) == 0


def test_file_that_cannot_grow_leaves_the_last_checkpoint_and_says_so(corpus, tmp_path):
    """A limit on the size of files stands for a full disk: the write fails in the middle, for real."""
    plain = tiny(corpus, tmp_path, "--trainer.max_steps=10")
    assert main(["fit", *plain]) == 0
    checkpoint = last_checkpoint(tmp_path)
    size = checkpoint.stat().st_size

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))

    again = [*plain, "--trainer.max_steps=20", f"--ckpt_path={checkpoint}", f"--checkpoint.dirpath={checkpoint.parent}"]
    process = in_own_process("fit", *again, preexec_fn=limit)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1 and "could not be written" in error and "Traceback" not in error
    assert [path.name for path in checkpoint.parent.iterdir() if path.name.startswith(".")] == []
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 10


@pytest.mark.parametrize("command", ["validate", "test"])
def test_measuring_needs_a_checkpoint(command, capsys):
    assert main([command]) == 2
    assert "ckpt_path" in capsys.readouterr().err


def test_run_that_ends_between_two_validations_validates_at_its_end(corpus, tmp_path):
    assert main(["fit", *tiny(corpus, tmp_path, "--trainer.max_steps=10")]) == 0
    with (tmp_path / "version_0/metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file) if row["val_loss"]] == [10]
    assert (tmp_path / "version_0/checkpoints/best.ckpt").is_file()


def test_resuming_with_the_checkpoint_alone_restores_what_was_linked(corpus, finished, tmp_path):
    """Micro-batches, clipping and the length of the run belong to the trainer's section and are kept all the same."""
    checkpoint = finished / "checkpoints/best.ckpt"
    args = [f"--ckpt_path={checkpoint}", f"--trainer.default_root_dir={tmp_path}", "--trainer.accelerator=cpu"]
    assert main(["fit", *args, "--trainer.enable_progress_bar=false", "--trainer.val_check_interval=15"]) == 0
    config = yaml.safe_load((tmp_path / "version_0/config.yaml").read_text())["trainer"]
    assert (config["accumulate_grad_batches"], config["gradient_clip_val"], config["max_steps"]) == (3, 0.5, 60)


def test_complete_run_has_nothing_left_to_do(corpus, finished, tmp_path, capsys):
    assert main(["fit", *tiny(corpus, tmp_path, f"--ckpt_path={finished / 'checkpoints/last.ckpt'}")]) == 0
    assert "no step was made" in capsys.readouterr().out


@pytest.mark.parametrize("content", [{}, {"mutransformer": 3}, {"mutransformer": {"config": {}}}])
def test_foreign_checkpoint_is_one_line(content, tmp_path, capsys):
    torch.save(content, tmp_path / "foreign.ckpt")
    assert main(["validate", f"--ckpt_path={tmp_path / 'foreign.ckpt'}"]) == 2
    assert "was not written by this package" in capsys.readouterr().err


def test_learning_rate_monitor_shows_each_parameter_by_name(corpus, tmp_path):
    monitor = "--trainer.callbacks+=LearningRateMonitor"
    assert main(["fit", *tiny(corpus, tmp_path, monitor, "--trainer.max_steps=5")]) == 0
    header = (tmp_path / "version_0/metrics.csv").read_text().splitlines()[0].split(",")
    assert {"lr-AdamW/w_query", "lr-AdamW/embedding", "lr-AdamW/unembedding"} <= set(header)


@pytest.mark.parametrize(("learning_rate", "same"), [(0, True), (1e-3, False)])
def test_learning_rate_zero_changes_nothing(learning_rate, same, corpus, tmp_path):
    """Not even by weight decay; with another rate more steps give other weights."""
    settings = [f"--model.optimizer.learning_rate={learning_rate}", "--model.optimizer.weight_decay=0.001"]
    weights = []
    for n_steps in (1, 6):
        args = tiny(corpus, tmp_path / str(n_steps), *settings, f"--trainer.max_steps={n_steps}")
        assert main(["fit", *args]) == 0
        checkpoint = torch.load(last_checkpoint(tmp_path / str(n_steps)), weights_only=True)
        weights.append({k: v for k, v in checkpoint["state_dict"].items() if k.startswith("decoder.")})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]) is same


# Data


def test_prepare_makes_the_cache_that_fit_uses(corpus, tmp_path, capsys):
    cache = f"--data.cache={tmp_path / 'cache'}"
    options = tiny(corpus, tmp_path / "runs", cache, "--trainer.max_steps=1")
    data = ["--data.dataset=text", f"--data.data_files={corpus}", "--data.validation_fraction=0.2", cache]
    assert main(["prepare", *data]) == 0
    (folder,) = (tmp_path / "cache").iterdir()
    said = capsys.readouterr().out
    assert said.startswith(f"{folder}: 40 documents, ") and "(train, validation)" in said
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main(["fit", *options]) == 0
    assert "an epoch: 32 batches of 16 windows; left out: " in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == written
    assert main(["data", *data, "--verify"]) == 0
    said = capsys.readouterr().out
    assert "complete, every hash is right" in said and "this configuration uses it" in said
    assert main(["data", *data, "--data.max_documents=30"]) == 0
    assert "not used by this configuration: data.max_documents is 30 here and None there" in capsys.readouterr().out
    shard = folder / "train" / "000000.npy"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["data", *data]) == 1
    assert f"{shard} is damaged" in capsys.readouterr().out
    assert main(["fit", *options]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{shard} is damaged" in line and "delete" in line


@pytest.mark.parametrize("args", [["--data.data_files=none/*.txt"], ["--data.data_files=none.txt"]])
def test_missing_files_are_one_line(args, capsys):
    assert main(["prepare", "--data.dataset=text", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mutransformer: data.data_files=") and "no file has this path" in line


def test_fit_with_attention_within_documents_trains_other_weights(corpus, tmp_path):
    last = []
    for name in ("true", "false", "false"):
        root = tmp_path / str(len(last))
        within = f"--data.attend_across_documents={name}"
        assert main(["fit", *tiny(corpus, root, within, "--trainer.max_steps=6", "--trainer.limit_val_batches=1")]) == 0
        last.append(last_checkpoint(root))
    assert_same_weights(*last[1:])
    with pytest.raises(AssertionError):
        assert_same_weights(*last[:2])


def assert_same_weights(left: Path, right: Path) -> None:
    ours, theirs = (torch.load(path, weights_only=True)["state_dict"] for path in (left, right))
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "data").iterdir()))
def test_a_data_config_is_laid_over_any_model(name, capsys):
    """Without network: the configs of hub datasets give the size of the vocabulary, and nothing is read for a plan."""
    data = yaml.safe_load((CONFIGS / "data" / f"{name}.yaml").read_text())
    assert set(data) == {"data"}
    for model in LADDER:
        rows = described(
            capsys, "--config", str(CONFIGS / f"{model}.yaml"), "--config", str(CONFIGS / "data" / f"{name}.yaml")
        )["rows"]
        embedding = next(row for row in rows if row["name"] == "embedding")
        assert embedding["shape"] == [data["data"].get("vocab_size", 384), LADDER[model]]
