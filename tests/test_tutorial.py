"""Every command of docs/tutorial.md, as it stands, in the order of the text."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT, command_lines

from mutransformer.cli import main

COMMANDS = command_lines(ROOT / "docs" / "tutorial.md", "mutransformer")


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tutorial reads, without the runs of whoever works here."""
    folder = tmp_path_factory.mktemp("repository")
    for name in ("configs", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(COMMANDS)), ids=lambda number: f"{number}-{COMMANDS[number][1]}")
def test_a_command_of_the_tutorial_does_what_the_text_says(number, copy, monkeypatch, capsys):
    monkeypatch.chdir(copy)
    command, *options = COMMANDS[number][1:]
    code = main([command, *options])
    said = capsys.readouterr().out
    if command == "transfer":  # so short a study may come to FAIL, as the text says, but it comes to a verdict
        assert code in (0, 1)
        assert json.loads((copy / "runs/tutorial-transfer/verdict.json").read_text())["findings"]
    else:
        assert code == 0
    if "--resume" in options:
        assert "step 40" in said and [path.name for path in (copy / "runs/tutorial-text").iterdir()] == ["version_0"]
    if "--profile_steps" in options:
        assert (copy / "runs/tutorial-profile/version_0/trace_10_12.json.gz").stat().st_size > 1000


@pytest.mark.slow
def test_the_command_on_xla_devices(copy):
    (words,) = command_lines(ROOT / "docs" / "tutorial.md", "PJRT_DEVICE=CPU")
    settings = dict(word.split("=", 1) for word in words[: words.index("mutransformer")])
    argv = [sys.executable, "-m", "mutransformer.cli", *words[words.index("mutransformer") + 1 :]]
    done = subprocess.run(argv, cwd=copy, env={**os.environ, **settings}, text=True, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled: training 1, validation 1; 3 graphs in all" in done.stdout


def test_the_tutorial_has_a_command_of_each_kind():
    named = {command[1] for command in COMMANDS}
    assert named >= {"fit", "validate", "coordcheck", "transfer", "describe", "bench", "sample", "export"}
