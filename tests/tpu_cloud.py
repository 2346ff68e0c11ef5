"""A cloud with a TPU of two hosts, for tests of scripts/tpu.sh: a `gcloud` that keeps a TPU's state in a file and runs
each host's commands in a folder.

The hosts' bash, flock and tmux are this machine's, and the package that they run is the copy that was sent to them.
What they have not got here stands in: sudo and systemd, a venv, and pip, which would fetch gigabytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "tpu.sh"

# A request waits for one look at it, then is active with its hosts; it is preempted once there is a file of the pattern
# in `preempt`.
GCLOUD = f"""#!{sys.executable}
import contextlib, os, pathlib, shutil, signal, subprocess, sys

cloud = pathlib.Path(os.environ["CLOUD"])
state, hosts, preempt = cloud / "state", cloud / "hosts", cloud / "preempt"
words, options, rest = [], {{}}, iter(sys.argv[1:])
for word in rest:
    if word in ("--spot", "--force", "--quiet", "--internal-ip"):
        options[word] = True
    elif word.startswith("--"):
        options[word] = next(rest)
    else:
        words.append(word)
command, names = " ".join(words[:4]), words[4:]
with open(cloud / "calls", "a") as calls:
    print(command, *names, *sorted(option for option in options if option != "--command"), file=calls)
if options["--zone"] != "somewhere" or names and names[-1].rstrip(":") != "mu":
    sys.exit("gcloud: " + " ".join(sys.argv))

if "REAL_GCLOUD" in os.environ:  # without an account it ends before it asks anyone, but after it has read its flags
    there = {{"CLOUDSDK_CONFIG": str(cloud / "none"), "CLOUDSDK_CORE_PROJECT": "none"}}
    there["CLOUDSDK_CORE_CHECK_GCE_METADATA"] = "false"
    line = [os.environ["REAL_GCLOUD"], *sys.argv[1:]]
    said = subprocess.run(line, env={{**os.environ, **there}}, capture_output=True, text=True).stderr
    if "not currently have an active account" not in said:
        sys.exit(said)


def lose_hosts():
    for pid in hosts.glob("*/systemd/pid"):
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(int(pid.read_text()), signal.SIGKILL)
    shutil.rmtree(hosts)


if command == "compute tpus queued-resources create":
    assert options["--node-id"] == "mu" and not state.exists()
    (cloud / "request").write_text(f"{{options['--accelerator-type']}} {{options['--runtime-version']}}")
    state.write_text("WAITING_FOR_RESOURCES")
elif command == "compute tpus queued-resources list":
    assert options["--filter"] == "name~/mu$"
    if preempt.exists() and any(cloud.glob(preempt.read_text())):
        preempt.unlink()
        lose_hosts()
        state.write_text("SUSPENDED")
    if state.exists():
        print(state.read_text())
        if state.read_text() == "WAITING_FOR_RESOURCES":
            state.write_text("ACTIVE")
            for i in range(int(os.environ.get("HOSTS", "2"))):
                (hosts / f"host-{{i}}").mkdir(parents=True)
elif command == "compute tpus queued-resources delete":
    if state.read_text() == "ACTIVE":
        lose_hosts()
    state.unlink()
elif command == "compute tpus tpu-vm describe":
    node = cloud / "node"  # may be gone while the request is active still
    print(node.read_text() if node.exists() else "READY")
elif command == "compute tpus tpu-vm scp":
    for host in hosts.iterdir():
        shutil.copy(names[0], host)
elif command == "compute tpus tpu-vm ssh":
    asked = sorted(hosts.iterdir()) if options["--worker"] == "all" else [hosts / f"host-{{options['--worker']}}"]
    processes = []
    for host in asked:
        env = {{**os.environ, "HOME": str(host), "TMUX_TMPDIR": str(host)}}
        env = {{name: value for name, value in env.items() if name not in ("TMUX", "PYTHONPATH")}}
        line = ["bash", "-c", options["--command"]]
        processes.append(subprocess.Popen(line, cwd=host, env=env, stdin=subprocess.DEVNULL))
    sys.exit(next((code for code in [process.wait() for process in processes] if code), 0))
else:
    sys.exit("gcloud: " + " ".join(sys.argv))
"""

SUDO = """#!/bin/bash
mkdir -p "$HOME/etc/systemd/system"
exec "${@/#\\/etc\\//$HOME/etc/}"
"""

# One service, mutransformer. `pid` is its main process and process group.
SYSTEMCTL = """#!/bin/bash
at=$HOME/systemd unit=$HOME/etc/systemd/system/mutransformer.service
setting() { sed -n "s/^$1=//p" "$unit"; }
[ "$1" != -q ] || shift
case $1 in
restart)
    "$0" stop
    rm -rf "$at" && mkdir "$at" && cd "$(setting WorkingDirectory)" || exit
    log=$(setting StandardOutput)
    setsid bash -c 'setsid $0 & echo $! >"$1/pid"; wait $!; echo $? >"$1/status"' "$(setting ExecStart)" "$at" \
        >>"${log#append:}" 2>&1 </dev/null &
    until [ -e "$at/pid" ]; do sleep 0.05; done
    ;;
stop)
    [ -e "$at/pid" ] || exit 5
    kill "$(cat "$at/pid")" 2>/dev/null
    until [ -e "$at/status" ]; do sleep 0.05; done
    ;;
show)
    status=$(cat "$at/status" 2>/dev/null)
    case $4 in  # show mutransformer -p NAME --value
    ActiveState) if [ -e "$at/pid" ] && [ -z "$status" ]; then echo active; else echo inactive; fi ;;
    ExecMainExitTimestampMonotonic) if [ -n "$status" ]; then echo 1234; else echo 0; fi ;;
    ExecMainStatus) echo "${status:-0}" ;;
    esac
    ;;
esac
"""

# Of a host, and of its venv once pip has put PROGRAM there.
PYTHON = f"""#!/bin/bash
case "$*" in
*sys.version_info*) exit "${{WRONG_VERSION:-0}}" ;;
"-m venv"*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
"-m pip"*) echo "$*" >>"$HOME/pip" && cp "$PROGRAM" "$(dirname "$0")/mutransformer" ;;
--version) echo Python 3.9 ;;
*) cd "$HOME" && PYTHONPATH=$HOME/mutransformer:$EXTRA_PATH exec {sys.executable} "$@" ;;
esac
"""

PACKAGE = """#!/bin/bash
exec "$(dirname "$0")/python" -W ignore -m mutransformer.cli "${@/#configs/$HOME/mutransformer/configs}"
"""

# A run of STEPS steps that keeps its state in the bucket and goes on from there.
RUN = """#!/bin/bash
trap 'echo saved; exit 143' TERM
trap 'echo saved; exit 130' INT
mine=$CLOUD/bucket/$(basename "$HOME")
step=$(cat "$mine" 2>/dev/null || echo 0)
echo "$PJRT_DEVICE: $* from $step" | tee -a "$mine.starts"
[ "$*" != fail ] || { echo broken; exit 2; }
while [ "$step" -lt "$STEPS" ]; do
    sleep 0.1
    step=$((step + 1))
    echo "$step" >"$mine.new" && mv "$mine.new" "$mine"
    [ "$step" -lt 3 ] || touch "$mine.third"
done
"""


class Cloud:
    """A folder that stands for the cloud: two hosts, a bucket, and the calls of `gcloud`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        (folder / "bucket").mkdir()
        programs = {"gcloud": GCLOUD, "sudo": SUDO, "systemctl": SYSTEMCTL, "python3": PYTHON, "package": PACKAGE}
        for name, text in {**programs, "a_run": RUN}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.env = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "CLOUD": str(folder),
            "OMP_NUM_THREADS": "1",
            "POLL_SECONDS": "0.1",
            "TPU_NAME": "mu",
            "ZONE": "somewhere",
            "ACCELERATOR_TYPE": "v4-16",
            "STEPS": "100000",
        }
        self.use("a_run")

    def use(self, program: str) -> None:
        """What `mutransformer` is on hosts that are set up from now on."""
        self.env["PROGRAM"] = str(self.folder / "bin" / program)

    def tpu(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        env = {**self.env, **env}
        return subprocess.run([str(SCRIPT), *args], env=env, capture_output=True, text=True, timeout=60)

    def ready(self, *args: str, **env: str) -> str:
        """Output of a command that must succeed."""
        done = self.tpu(*args, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def host(self, i: int) -> Path:
        return self.folder / "hosts" / f"host-{i}"

    def wait_for(self, name: str) -> None:
        """Until the bucket has this file of both hosts."""
        until = time.monotonic() + 30
        while not all((self.folder / "bucket" / f"host-{i}{name}").exists() for i in (0, 1)):
            assert time.monotonic() < until, f"no {name}"
            time.sleep(0.05)
