"""The transfer study: what it judges from given curves, what it runs, and that it goes on where it was stopped."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import time

import numpy as np
import pytest
import yaml
from cli_runs import in_own_process, write_corpus

from mutransformer.cli import main
from mutransformer.errors import ConfigError
from mutransformer.verify.points import Point, Result
from mutransformer.verify.settings import DEPTH, LEARNING_RATE, SEED, WIDTH
from mutransformer.verify.transfer import Grid, first_step_not_better, judge_search, judge_transfer, sweeps

SIZES, EXPONENTS, SEEDS, N_STEPS, WARMUP = (32, 64, 128, 256), range(-9, -2), (1, 2, 3), 60, 10


def falls(size):
    return 3 - 0.1 * math.log2(size)


def study(variant, best_exponent, *, loss=falls, gap=lambda size, step: 0.0, others=None):
    """Results whose loss is a parabola around `best_exponent(size)`; with a little noise that is a seed's own."""
    results = []
    for size in SIZES:
        for exponent in EXPONENTS:
            for seed in SEEDS:
                level = loss(size) + 0.05 * (exponent - best_exponent(size)) ** 2 + 0.003 * seed
                steps = np.arange(N_STEPS)
                losses = level + np.exp(-steps / 5) + np.array([gap(size, step) for step in steps])
                changes = {WIDTH: size, **(others or {}), LEARNING_RATE: 2.0**exponent, SEED: seed}
                results.append(
                    (Point(variant=variant, changes=changes, settings={}), Result(status="done", losses=losses))
                )
    return results


def stays(size):
    return -6.2


def moves(size):
    return -5.0 - math.log2(size / 32)


def verdict_of(*studies):
    return judge_transfer(
        sweeps([run for one in studies for run in one], WIDTH), size_name="d_model", warmup_steps=WARMUP
    )


def outcome(verdict):
    return {finding.name: finding.passed for finding in verdict.findings}


def test_passes_where_the_optimum_stays_and_the_control_moves():
    verdict = verdict_of(study("mup", stays), study("sp", moves))
    assert outcome(verdict) == {
        "mup: grid": True,
        "mup: drift": True,
        "mup: regret": True,
        "mup: wider is better": True,
        "control sp fails": True,
    }
    sizes = verdict.figures["sweeps"][0]["sizes"]
    assert [size["best_log2_learning_rate"] for size in sizes] == [-6] * 4
    assert sizes[2]["optimum_log2_learning_rate"].mean == pytest.approx(-6.2)
    assert verdict.figures["sweeps"][1]["drift_octaves"].mean == pytest.approx(-3)


def test_fails_where_the_optimum_moves():
    found = outcome(verdict_of(study("mup", moves)))
    assert not found["mup: drift"] and not found["mup: regret"]


def test_drift_is_judged_in_octaves_over_the_whole_range():
    for octaves, passed in ((0.9, True), (1.1, False)):
        found = outcome(verdict_of(study("mup", lambda size, o=octaves: -6.0 + o * math.log2(size / 32) / 3)))
        assert found["mup: drift"] is passed


def test_regret_is_judged_against_what_width_gains():
    """An octave off costs 0.04 nats here; where width gains 0.6 that is small, where it gains 0.3 it is not."""

    def octave_off(size):
        return -6.0 + 0.9 * math.log2(size / 32) / 3

    for gain, passed in ((0.6, True), (0.3, False)):
        results = study("mup", octave_off, loss=lambda size, g=gain: 3 - g / 3 * math.log2(size))
        assert outcome(verdict_of(results))["mup: regret"] is passed


def test_optimum_at_the_edge_of_the_grid_is_a_failure_of_the_grid():
    verdict = verdict_of(study("mup", lambda size: -9.0))
    assert not outcome(verdict)["mup: grid"]
    assert "widen it" in verdict.failures[0].reason


def test_control_at_the_edge_is_no_failure_of_the_control():
    verdict = verdict_of(study("mup", stays), study("sp", lambda size: -9.0))
    assert not outcome(verdict)["control sp fails"]


def test_diverged_run_counts_as_infinitely_bad():
    results = study("mup", stays)
    diverged = [
        (
            point,
            Result(status="diverged", losses=result.losses[:5]) if point.changes[LEARNING_RATE] == 2**-5 else result,
        )
        for point, result in results
    ]
    verdict = verdict_of(diverged)
    assert verdict.figures["sweeps"][0]["sizes"][0]["mean_loss"][4] == math.inf
    assert verdict.figures["sweeps"][0]["sizes"][0]["best_log2_learning_rate"] == -6


def test_wider_is_not_better_is_found_with_its_step():
    verdict = verdict_of(study("mup", stays, gap=lambda size, step: 0.3 if size == 128 and 30 <= step < 40 else 0.0))
    failure = next(finding for finding in verdict.failures if "wider" in finding.name)
    step = int(re.fullmatch(r"128 falls behind 64 at step (\d+)", failure.reason)[1])
    assert 30 < step <= 38


@pytest.mark.parametrize(("gap_at", "found"), [((0, 8), None), ((22, 40), 26)], ids=["in warm-up", "later"])
def test_first_step_not_better(gap_at, found):
    narrow = [np.full(60, 2.0)]
    wide = [np.full(60, 1.9)]
    wide[0][slice(*gap_at)] = 2.3
    assert first_step_not_better(narrow, wide, start=10) == found


def test_noise_alone_is_not_behind():
    random = np.random.default_rng(0)
    narrow = [2.0 + 0.1 * random.normal(size=300) for _ in SEEDS]
    wide = [run - 0.1 + 0.02 * random.normal(size=300) for run in narrow]
    assert first_step_not_better(narrow, wide, start=10) is None


def test_control_is_compared_with_what_differs_in_nothing_else():
    def studies(variant, best, gain):
        return [
            study(variant, best, loss=lambda s, v=value: falls(s) - gain * v, others={"a.b": value}) for value in (1, 4)
        ]

    notes = verdict_of(*studies("mup", stays, 0.01), *studies("sp", moves, 0.1)).notes
    gaps = [float(re.search(r"([\d.]+) behind sp", note)[1]) for note in notes]
    assert gaps == pytest.approx([0.09, 0.36], abs=0.01)


def test_wider_run_that_diverges_falls_behind_where_it_does():
    whole, short = [np.full(60, 2.0)], [np.full(40, 1.9)]
    assert first_step_not_better(whole, short, start=10) == 41
    assert first_step_not_better(short, [np.full(60, 1.8)], start=10) is None


@pytest.mark.parametrize("key", [WIDTH, LEARNING_RATE, SEED, "data.shuffle_seed"])
def test_axis_cannot_be_what_a_study_varies_anyway(key):
    with pytest.raises(ConfigError, match="varies anyway"):
        Grid(widths=[8, 16], log2_learning_rates=[-6], seeds=[1], axis=(key, [1, 2]))


def test_one_more_axis_is_judged_for_each_of_its_values():
    studies = [study("mup", best, others={"a.multiplier": value}) for value, best in ((1, stays), (4, moves))]
    found = outcome(verdict_of(*studies))
    assert found["mup multiplier=1: drift"] and not found["mup multiplier=4: drift"]


def test_search_is_judged_against_the_control_tuned_at_the_largest():
    one_rate = [run for run in study("mup", stays) if run[0].changes[LEARNING_RATE] == 2**-6]

    def verdict(offset):
        control = study("sp", moves, loss=lambda size: 3 - 0.1 * math.log2(size) + offset)
        return judge_search(sweeps(one_rate + control, WIDTH), size_name="d_model", n_runs=9, warmup_steps=WARMUP)

    assert verdict(0.1).passed
    assert [finding.name for finding in verdict(-0.1).failures] == ["worth it against sp"]
    at_the_edge = study("sp", lambda size: -9.0, loss=lambda size: 9.0)
    found = sweeps(one_rate + at_the_edge, WIDTH)
    (failure,) = judge_search(found, size_name="d_model", n_runs=9, warmup_steps=WARMUP).failures
    assert "not tuned" in failure.reason


# ---- the command -----------------------------------------------------------------------------------------------------

TINY = {
    "data.dataset": "text",
    "data.validation_fraction": 0.2,
    "data.sequence_len": 16,
    "data.tokens_per_batch": 64,
    "model.decoder.n_layer": 1,
    "model.decoder.d_head": 8,
    "model.parametrization.d_base": 8,
    "trainer.accelerator": "cpu",
    "trainer.max_steps": 12,
    "checkpoint.every_n_steps": 0,
    "widths": "[8,16]",
    "log2_learning_rates": "[-7,-6,-5]",
    "seeds": "[1,2]",
    "compare": "null",
}


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "corpus").mkdir()
    return write_corpus(tmp_path / "corpus")


def command(corpus, out, **changes):
    options = {**TINY, "data.data_files": corpus, "out": out, **changes}
    return ["transfer", *(f"--{key}={value}" for key, value in options.items())]


def table_of(out, name="transfer.csv"):
    with (out / name).open() as file:
        return list(csv.DictReader(file))


def without_times(rows):
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_command_writes_table_pictures_and_verdict(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    assert main(command(corpus, out, compare="sp")) in (0, 1)  # so few steps prove nothing
    rows = table_of(out)
    assert len(rows) == 2 * 2 * 3 * 2 and {row["status"] for row in rows} == {"done"}
    assert {row["variant"] for row in rows} == {"mup", "sp"}
    assert all(float(row["loss"]) < 6.5 for row in rows)
    for name in ("transfer.png", "wider.png"):
        assert (out / name).stat().st_size > 10_000
    verdict = json.loads((out / "verdict.json").read_text())
    assert {sweep["variant"] for sweep in verdict["figures"]["sweeps"]} == {"mup", "sp"}
    assert any(note.startswith("is it worth it") for note in verdict["notes"])
    shown = capsys.readouterr().out
    assert "transfer: " in shown and "best LR" in shown


def test_results_and_pictures_go_to_weights_and_biases(tmp_path, corpus, monkeypatch, capsys):
    """Offline, through the real client: its file holds the metrics, the verdict and the pictures."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = tmp_path / "out"
    logger = {"trainer.logger": "WandbLogger", "trainer.logger.save_dir": tmp_path, "trainer.logger.project": "study"}
    assert main(command(corpus, out, **logger)) in (0, 1)
    (run,) = tmp_path.glob("wandb/offline-run-*")
    (file,) = run.glob("*.wandb")
    deadline = time.monotonic() + 30  # the client's own process writes it
    while b"passed" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    for name in (b"mup/best_log2_learning_rate", b"mup/regret", b"passed"):
        assert name in file.read_bytes()
    assert len(list(run.glob("files/media/images/pictures_*.png"))) == 2


def test_same_command_again_runs_nothing_and_a_larger_grid_the_rest(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    main(command(corpus, out))
    first = table_of(out)
    capsys.readouterr()
    main(command(corpus, out))
    assert "[1/" not in capsys.readouterr().out
    assert table_of(out) == first
    main(command(corpus, out, widths="[8,16,24]"))
    assert "[6/6" in capsys.readouterr().out
    assert len(table_of(out)) == 18


def test_jobs_and_shards_give_the_same_table(tmp_path, corpus, capsys):
    alone, shards, jobs = (tmp_path / name for name in ("alone", "shards", "jobs"))
    main(command(corpus, alone))
    assert main(command(corpus, shards, shard="1/2")) == 0
    assert "6 of 12 points" in capsys.readouterr().out
    assert not (shards / "verdict.json").exists()
    main(command(corpus, shards, shard="2/2"))
    main(command(corpus, jobs, jobs=2))
    for out in (shards, jobs):
        assert without_times(table_of(out)) == without_times(table_of(alone))
        assert (out / "verdict.json").exists()


def test_shards_side_by_side_in_one_folder_end_with_a_verdict(tmp_path, corpus):
    """Whichever is last sees the points of the other, and its table has all rows."""
    out = tmp_path / "out"
    shards = [in_own_process(*command(corpus, out, shard=f"{i}/2")) for i in (1, 2)]
    outputs = [shard.communicate(timeout=200) for shard in shards]
    assert (out / "verdict.json").exists(), outputs
    assert len(table_of(out)) == 12


def test_killed_study_goes_on_with_what_is_left(tmp_path, corpus):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    options = {"trainer.max_steps": 150, "seeds": "[1]", "widths": "[8,16]"}
    main(command(corpus, undisturbed, **options))
    for signum in (signal.SIGKILL, signal.SIGTERM):
        n_before = len(list(killed.glob("points/*/done.json")))
        process = in_own_process(*command(corpus, killed, jobs=2, **options))
        deadline = time.monotonic() + 120
        while len(list(killed.glob("points/*/done.json"))) == n_before and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signum)
        output, error = process.communicate(timeout=60)
        assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum), error
    assert "the same command goes on" in output
    n_kept = len(list(killed.glob("points/*/done.json")))
    assert 2 <= n_kept < 6
    main(command(corpus, killed, **options))
    assert without_times(table_of(killed)) == without_times(table_of(undisturbed))


def test_failed_point_is_a_row_and_is_tried_again(tmp_path, corpus, capsys, monkeypatch):
    from mutransformer.verify import points

    out, real = tmp_path / "out", points.train

    def fails_once(point, data, checkpoints):
        if point.changes[WIDTH] == 16 and point.changes[SEED] == 2:
            raise RuntimeError("out of memory\nsecond line")
        return real(point, data, checkpoints)

    monkeypatch.setattr(points, "train", fails_once)
    assert main(command(corpus, out)) == 1
    failed = [row for row in table_of(out) if row["status"] == "failed"]
    assert {row["error"] for row in failed} == {"RuntimeError: out of memory"} and len(failed) == 3
    assert "failed" in capsys.readouterr().out
    monkeypatch.setattr(points, "train", real)
    main(command(corpus, out))
    assert {row["status"] for row in table_of(out)} == {"done"}


def test_worker_that_dies_fails_its_point_alone(tmp_path, corpus):
    """One of two workers is killed in its first point; the study ends with that point failed."""
    out = tmp_path / "out"
    process = in_own_process(*command(corpus, out, jobs=2, **{"trainer.max_steps": 300, "seeds": "[1]"}))
    deadline = time.monotonic() + 120
    while not list(out.glob("points/*/done.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    children = children_of(process.pid)
    os.kill(children[-1], signal.SIGKILL)
    output, error = process.communicate(timeout=300)
    rows = table_of(out)
    assert len(rows) == 6, output + error
    assert sorted(row["status"] for row in rows) == ["done"] * 5 + ["failed"]
    assert "its process ended with -9" in next(row["error"] for row in rows if row["status"] == "failed")


def children_of(pid):
    """Processes that were started by `pid` and train points, oldest first."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as stat, open(f"/proc/{entry}/cmdline") as cmdline:
                    if int(stat.read().rpartition(")")[2].split()[1]) == pid and "spawn_main" in cmdline.read():
                        found.append(int(entry))
            except OSError:
                continue
    return sorted(found)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("done.json", b'{"variant": "mu'),
        ("done.json", b"null"),
        ("done.json", b'{"result": {"status": "done", "seconds": "x"}}'),
        ("losses.npy", b""),
        ("losses.npy", b"garbage"),
    ],
)
def test_damaged_point_is_trained_again(tmp_path, corpus, capsys, name, content):
    out = tmp_path / "out"
    main(command(corpus, out, seeds="[1]"))
    whole = without_times(table_of(out))
    next(out.glob(f"points/*/{name}")).write_bytes(content)
    capsys.readouterr()
    main(command(corpus, out, seeds="[1]"))
    assert "[1/1" in capsys.readouterr().out
    assert without_times(table_of(out)) == whole


def test_damaged_checkpoint_of_a_point_is_no_obstacle(tmp_path, corpus):
    options = {"checkpoint.every_n_steps": 5, "log2_learning_rates": "[-6]", "seeds": "[1]"}
    out, again = tmp_path / "out", tmp_path / "again"
    main(command(corpus, out, **options))
    for point in out.glob("points/*"):
        folder = again / "points" / point.name / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "step_00000005.ckpt").write_text("junk")
    main(command(corpus, again, **options))
    assert without_times(table_of(again)) == without_times(table_of(out))


def test_search_in_which_all_diverge_says_so(tmp_path, corpus, capsys):
    space = "{model.optimizer.learning_rate: [1.0e+30, 1.0e+38]}"
    assert main(command(corpus, tmp_path / "out", search=2, search_space=space)) == 1
    assert "every draw diverged" in capsys.readouterr().err


def test_verdict_of_a_smaller_study_does_not_outlive_it(tmp_path, corpus, monkeypatch):
    from mutransformer.verify import points

    out = tmp_path / "out"
    main(command(corpus, out, seeds="[1]"))
    assert (out / "verdict.json").exists()

    def fails(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(points, "train", fails)
    assert main(command(corpus, out, seeds="[1,2]")) == 1
    assert not (out / "verdict.json").exists()


def test_diverged_point_is_a_row(tmp_path, corpus):
    out = tmp_path / "out"
    options = {"log2_learning_rates": "[-6,100]", "trainer.max_steps": 45, "widths": "[8,16]", "seeds": "[1]"}
    assert main(command(corpus, out, **options)) == 1
    diverged = next(row for row in table_of(out) if float(row[LEARNING_RATE]) > 1)
    assert diverged["status"] == "diverged" and diverged["loss"] == "inf" and int(diverged["steps"]) < 20


def test_point_goes_on_from_its_checkpoint(tmp_path, corpus, monkeypatch):
    """A run of hours must not begin again: stopped in its middle, it ends with the losses of one that was not."""
    from mutransformer.training.run_checkpoint import RunCheckpoint

    options = {"checkpoint.every_n_steps": 5, "widths": "[8,16]", "log2_learning_rates": "[-6]", "seeds": "[1]"}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    main(command(corpus, whole, **options))
    save, n_saved = RunCheckpoint.save, []

    def save_and_stop(self, trainer, **options):
        save(self, trainer, **options)
        n_saved.append(trainer.global_step)
        if len(n_saved) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunCheckpoint, "save", save_and_stop)
    assert main(command(corpus, stopped, **options)) == 143
    assert len(list(stopped.glob("points/*/checkpoints/last.ckpt"))) == 1
    monkeypatch.setattr(RunCheckpoint, "save", lambda self, trainer, **_: n_saved.append(trainer.global_step))
    main(command(corpus, stopped, **options))
    assert n_saved[2:] == [12, 12, 5, 10, 12, 12]  # the first point did not come by steps 5 and 10 again
    assert not list(stopped.glob("points/*/checkpoints"))
    for path in whole.glob("points/*/losses.npy"):
        assert np.array_equal(np.load(path), np.load(stopped / path.relative_to(whole)))


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"axis": "model.decoder.n_layer=1,2", "widths": "[8]"}, "depth varies"),
        ({"axis": "data.sequence_len=8,16"}, "sequence length varies"),
        ({"axis": "data.tokens_per_batch=64,128"}, "batch varies"),
        ({"axis": "trainer.max_steps=4,6"}, "number of steps varies"),
        ({"axis": "model.decoder.d_head=4,8"}, "head width varies"),
        ({"axis": "model.schedule.warmup_steps=0,1"}, "warm-up varies"),
        ({"axis": "data.max_documents=30,40"}, "data varies"),
    ],
)
def test_what_must_stay_fixed_is_warned_of_by_name(tmp_path, corpus, capsys, changes, warned):
    options = {"trainer.max_steps": 4, "log2_learning_rates": "[-6]", "seeds": "[1]", **changes}
    main(command(corpus, tmp_path / "out", **options))
    assert warned in capsys.readouterr().err


def test_depth_transfers_under_completep(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    options = {
        "axis": "model.decoder.n_layer=1,2",
        "widths": "[8]",
        "model.parametrization.depth_rule": "completep",
        "model.parametrization.n_base_layer": 1,
        "compare": "model.parametrization.depth_rule=none",
    }
    main(command(corpus, out, **options))
    assert "depth varies" not in capsys.readouterr().err
    sweeps = json.loads((out / "verdict.json").read_text())["figures"]["sweeps"]
    assert [(sweep["variant"], [size["n_layer"] for size in sweep["sizes"]]) for sweep in sweeps] == [
        ("mup", [1, 2]),
        ("depth_rule=none", [1, 2]),
    ]
    assert {row[DEPTH] for row in table_of(out)} == {"1", "2"}


def test_search_writes_a_config_that_reproduces_its_best(tmp_path, corpus, capsys):
    out = tmp_path / "out"
    assert main(command(corpus, out, search=3, compare="sp")) in (0, 1)
    assert len(table_of(out, "search.csv")) == 3
    finalists = table_of(out, "finalists.csv")
    assert len(finalists) == 3 * 2
    best = yaml.safe_load((out / "best.yaml").read_text())
    rate = best["model"]["optimizer"]["learning_rate"]
    ours = [row for row in table_of(out) if row["variant"] == "mup"]
    assert {float(row[LEARNING_RATE]) for row in ours} == {rate} and len(ours) == 4
    assert {int(row["steps"]) for row in finalists} == {4 * 12}  # longer than the draws
    means = {}
    for row in finalists:
        means[float(row[LEARNING_RATE])] = means.get(float(row[LEARNING_RATE]), 0.0) + float(row["loss"])
    assert min(means, key=lambda of: means[of]) == rate
    capsys.readouterr()
    main([*command(corpus, out, log2_learning_rates=f"[{math.log2(rate)}]"), "--config", str(out / "best.yaml")])
    assert "[1/" not in capsys.readouterr().out  # the same runs, by the file


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"widths": "[8,12]"}, "model.decoder.d_model=12"),
        ({"axis": "model.decoder.n_layer"}, "axis"),
        ({"axis": "model.decoder.n_layers=1,2"}, "n_layer"),
        ({"axis": "model.decoder.activation=relu,rellu"}, "model.decoder.activation='rellu'"),
        ({"compare": "mup"}, "compare"),
        ({"shard": "3/2"}, "shard"),
        ({"jobs": 0}, "jobs"),
        ({"seeds": "[]"}, "seeds"),
        ({"widths": "[8,8]"}, "widths"),
        ({"widths": "[16,8]"}, "widths"),
        ({"widths": "[8]"}, "widths"),
        ({"compare": "sp", "model.parametrization.rules": "sp"}, "compare"),
        ({"search": 2, "axis": "model.decoder.n_layer=1,2"}, "axis"),
        ({"log2_learning_rates": "[]"}, "log2_learning_rates"),
        ({"log2_learning_rates": "[-6,-4,-3]"}, "log2_learning_rates"),
        ({"search": -1}, "search"),
        ({"seeds": "[-1]"}, "seeds"),
        ({"seeds": "[4294967296]"}, "seeds"),
        ({"log2_learning_rates": "[2000]"}, "log2_learning_rates"),
        ({"axis": "jobs=1,2"}, "axis"),
        ({"axis": "data.sequence_len=16,7"}, "data.tokens_per_batch"),
        ({"axis": "data.tokenizer=bytes,/nowhere"}, "tokenizer"),
        ({"compare": "model.decoder.d_model=64"}, "compare"),
        ({"data.data_files": "/nowhere/*.txt"}, "data.data_files"),
        ({"trainer.devices": 2}, "trainer.devices"),
        ({"out": ""}, "out"),
        ({"out": "/proc/nowhere"}, "out"),
        ({"search": 2, "search_space": "{model.optimizer.learning_rate: [1, 0.1]}"}, "search_space"),
        ({"search": 2, "search_space": "{model.parametrization.qk_scale: [0.1, 1]}"}, "search_space"),
        ({"search": 2, "search_space": "{model.optimizer.learning_rates: [0.1, 1]}"}, "learning_rate"),
    ],
)
def test_mistakes_end_before_any_work(tmp_path, corpus, capsys, changes, named):
    out = tmp_path / "out"
    options = {"to": out, **{("to" if key == "out" else key): value for key, value in changes.items()}}
    assert main(command(corpus, options.pop("to"), **options)) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1, error
    assert not out.exists()
