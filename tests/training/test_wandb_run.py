"""Weights & Biases with its own client: offline, against a server on loopback, and with none that answers."""

from __future__ import annotations

import csv
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cli_runs import in_own_process, tiny, write_corpus
from loopback_wandb import server

from mutransformer.training.wandb_run import _mode

LOGGER = ("--trainer.logger=wandb", "--trainer.logger.project=demo")
KEY = "a" * 40


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what the machine's user may have set."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def environment(home: Path, **more: str) -> dict[str, str]:
    """A home without a key."""
    return {"HOME": str(home), "NETRC": str(home / "netrc"), **more}


def fit(corpus: str, root: Path, *options: str, **env: str) -> str:
    """Runs `fit` with the logger; returns what it said."""
    process = in_own_process("fit", *tiny(corpus, root, *LOGGER, *options), env=environment(root, **env))
    out, error = process.communicate(timeout=240)
    assert process.returncode == 0 and "Traceback" not in out + error, out + error
    return out + error


def steps_of(folder: Path) -> list[int]:
    """Of the rows with a training loss in metrics.csv."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row["train_loss"]]


def losses(rows: list[dict[str, Any]], name: str = "train_loss") -> dict[int, float]:
    return {int(row["trainer/global_step"]): row[name] for row in rows if name in row}


def test_without_a_key_it_is_offline_and_can_be_sent_later(corpus, tmp_path):
    said = fit(corpus, tmp_path, "--trainer.max_steps=20", "--trainer.logger.tags=[a,b]", "--trainer.logger.group=g")
    command = re.search(r"wandb: offline; to send it: (wandb sync .*)", said)
    assert command is not None
    assert steps_of(tmp_path / "version_0") == [5, 10, 15, 20]
    (table,) = (tmp_path / "version_0/wandb").glob("offline-run-*/files/media/table/plan*.table.json")
    plan = json.loads(table.read_text())
    assert {row[plan["columns"].index("name")] for row in plan["data"]} >= {"embedding", "w_query", "unembedding"}
    with server() as (url, received):
        sync = [sys.executable, "-m", "wandb", *command[1].split()[1:]]
        env = {**os.environ, **environment(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=url)}
        done = subprocess.run(sync, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
    ((run_id, run),) = received.runs.items()
    assert list(losses(received.history[run_id])) == [5, 10, 15, 20]
    assert json.loads(run["config"])["model"]["value"]["decoder"]["d_model"] == 32
    assert run["groupName"] == "g" and set(run["tags"]) == {"a", "b"}


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_same_run_there(corpus, tmp_path):
    with server() as (url, received):
        env = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": url}
        fit(corpus, tmp_path, "--trainer.max_steps=20", "--trainer.logger.name=a-name", **env)
        said = fit(corpus, tmp_path, "--trainer.max_steps=40", "--resume=auto", **env)
    ((run_id, run),) = received.runs.items()
    assert run["displayName"] == "a-name" and f"{url}/me/demo/runs/{run_id}" in said
    assert received.resumed == [run_id, run_id]
    rows = received.history[run_id]
    assert list(losses(rows)) == list(range(5, 41, 5)) == steps_of(tmp_path / "version_0")
    assert list(losses(rows, "val_loss")) == [15, 20, 30, 40]
    assert all(row["tokens"] == 512 * row["trainer/global_step"] for row in rows if "plan" not in row)
    assert sum("plan" in row for row in rows) == 1 and received.artifacts == ["run_table"]


@pytest.mark.slow
def test_a_server_that_is_not_there_stops_nothing(corpus, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    said = fit(corpus, tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=url, WANDB_INIT_TIMEOUT="2")
    assert "warning: wandb cannot be reached and goes on offline" in said
    assert steps_of(tmp_path / "version_0") == list(range(5, 61, 5))
    assert len(list((tmp_path / "version_0/wandb").glob("offline-run-*/run-*.wandb"))) == 1


@pytest.mark.slow
def test_a_server_that_goes_away_holds_up_the_end_alone(corpus, tmp_path):
    options = ["--trainer.callbacks+=cli_runs.SlowSteps", *LOGGER]
    with server() as (url, received):
        env = environment(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=url, WANDB_FINISH_TIMEOUT="3")
        process = in_own_process("fit", *tiny(corpus, tmp_path, *options), env=env)
        deadline = time.monotonic() + 120
        while not received.runs:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, out + error
    assert steps_of(tmp_path / "version_0") == list(range(5, 61, 5))


@pytest.mark.slow
def test_of_two_processes_one_logs(corpus, tmp_path):
    fit(corpus, tmp_path, "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_steps=20")
    assert len(list((tmp_path / "version_0").glob("wandb/offline-run-*"))) == 1
    assert steps_of(tmp_path / "version_0") == [5, 10, 15, 20]
    assert [path.name for path in tmp_path.glob("version_*")] == ["version_0"]


def test_when_it_is_offline(tmp_path, monkeypatch):
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    assert (_mode(None), _mode(True), _mode(False)) == ("offline", "offline", "online")
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {KEY}\n")
    assert _mode(None) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:1")
    assert _mode(None) == "offline"
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert _mode(None) == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert _mode(None) is None
