"""The script for TPU hosts, with a `gcloud` that runs each host's command in a folder of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cli_runs import write_corpus
from test_transfer import command, table_of

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "transfer_on_tpu_hosts.sh"

GCLOUD = """#!/bin/bash
# gcloud compute tpus tpu-vm ssh HOST --zone ZONE --command COMMAND
[ "$1 $2 $3 $4 $6 $7 $8" = "compute tpus tpu-vm ssh --zone somewhere --command" ] || exit 64
mkdir -p "$HOSTS/$5" && cd "$HOSTS/$5" && exec bash -c "$9"
"""


def test_hosts_share_the_grid_and_this_machine_judges(tmp_path):
    (tmp_path / "corpus").mkdir()
    corpus, bin, out = write_corpus(tmp_path / "corpus"), tmp_path / "bin", tmp_path / "out"
    bin.mkdir()
    (bin / "gcloud").write_text(GCLOUD)
    (bin / "mutransformer").write_text(f'#!/bin/bash\nexec {sys.executable} -W ignore -m mutransformer.cli "$@"\n')
    for program in bin.iterdir():
        program.chmod(0o755)
    options = [option for option in command(corpus, out, seeds="[1]")[1:] if not option.startswith("--out")]
    env = {**os.environ, "PATH": f"{bin}:{os.environ['PATH']}", "HOSTS": str(tmp_path / "hosts"), "ZONE": "somewhere"}

    def run():
        line = [str(SCRIPT), str(out), "vm-0", "vm-1", "--", *options]
        return subprocess.run(line, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)

    first = run()
    assert first.returncode in (0, 1), first.stderr
    assert "transfer: " in first.stdout and (out / "verdict.json").exists()
    for host in ("vm-0", "vm-1"):
        trained = [p for p in (tmp_path / "hosts" / host / "transfer" / "points").iterdir() if p.is_dir()]
        assert len(trained) == 3
    assert len(table_of(out)) == 6
    assert "[1/" not in run().stdout  # nothing was left


def test_host_that_fails_leaves_its_points_to_the_next_time(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, script in {
        "gcloud": '[ "$5" = good ] && exec cat >/dev/null; exit 1',
        "mutransformer": "echo judged",
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "ZONE": "somewhere"}
    line = [str(SCRIPT), str(tmp_path / "out"), "bad", "--", "--seeds=[1]"]
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "did not finish: bad" in done.stderr
    assert "judged" not in done.stdout


def test_usage_is_shown_without_hosts():
    done = subprocess.run([str(SCRIPT), "out"], capture_output=True, text=True)
    assert done.returncode == 2 and "HOST" in done.stderr
