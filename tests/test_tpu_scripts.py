"""scripts/tpu.sh against the cloud of `tpu_cloud`."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from cli_runs import assert_same_state, last_checkpoint, tiny, write_corpus
from tpu_cloud import ROOT, SCRIPT, Cloud


@pytest.fixture
def cloud(tmp_path):
    cloud = Cloud(tmp_path / "cloud")
    yield cloud
    if (cloud.folder / "state").exists():
        cloud.tpu("stop")
        cloud.tpu("delete")


@pytest.fixture
def two_hosts(cloud):
    cloud.ready("create")
    cloud.ready("install")
    return cloud


# ---- mistakes


@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        (["create"], {"TPU_NAME": ""}, "TPU_NAME is not set"),
        (["create"], {"ZONE": ""}, "ZONE is not set"),
        (["create"], {"ACCELERATOR_TYPE": ""}, "ACCELERATOR_TYPE is not set"),
        (["create"], {"ACCELERATOR_TYPE": "v99-8"}, "set RUNTIME_VERSION"),
        (["spot", "fit", "--resume=auto"], {"ACCELERATOR_TYPE": "v99-8"}, "set RUNTIME_VERSION"),
        (["run"], {}, "no command"),
        (["tmux"], {}, "no command"),
        (["service"], {}, "no command"),
        (["spot", "fit"], {}, "without --resume auto"),
        (["status"], {"PATH": ""}, "gcloud not found"),
    ],
)
def test_a_mistake_gets_one_line_and_nothing_is_made(cloud, args, env, said):
    if "PATH" in env:  # with all that the script runs but gcloud
        bare = cloud.folder / "bare"
        bare.mkdir()
        for program in ("bash", "cat", "dirname"):
            (bare / program).symlink_to(shutil.which(program))
        env = {"PATH": str(bare)}
    done = cloud.tpu(*args, **env)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert said in line and line.startswith("tpu.sh: ")
    assert not (cloud.folder / "state").exists()


@pytest.mark.parametrize("args", [[], ["fit"]])
def test_usage_is_shown_without_a_command(cloud, args):
    done = cloud.tpu(*args)
    assert done.returncode == 2
    assert "scripts/tpu.sh create" in done.stderr and "set -euo" not in done.stderr


def test_a_host_with_another_python_is_named(cloud):
    cloud.ready("create")
    done = cloud.tpu("install", WRONG_VERSION="1")
    assert done.returncode == 1
    assert "Python 3.9: libtpu needs 3.10 to 3.12" in done.stderr
    assert not (cloud.host(0) / "pip").exists()


# ---- what is asked of gcloud


@pytest.mark.parametrize("command", ["create", "install", "devices", "run", "tmux", "service", "stop", "delete"])
def test_a_dry_run_prints_and_does_nothing(cloud, command):
    more = ["fit"] if command in ("run", "tmux", "service") else []
    lines = cloud.ready(command, *more, DRY_RUN="1").splitlines()
    assert lines and all(line.startswith("gcloud compute tpus ") for line in lines)
    assert not (cloud.folder / "calls").exists()


def test_a_dry_run_of_spot_is_one_round(cloud):
    lines = cloud.ready("spot", "fit", "--resume=auto", DRY_RUN="1").splitlines()
    verbs = [" ".join(line.split()[3:5]) for line in lines]
    create, delete = "queued-resources create", "queued-resources delete"
    assert verbs == [create, "tpu-vm scp", "tpu-vm ssh", "tpu-vm ssh", delete]
    assert "--spot" in lines[0]
    assert not (cloud.folder / "calls").exists()


@pytest.mark.parametrize(
    ("kind", "version", "image"),
    [
        ("v2-8", "", "tpu-ubuntu2204-base"),
        ("v4-32", "", "tpu-ubuntu2204-base"),
        ("v5litepod-16", "", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "", "v2-alpha-tpuv5"),
        ("v6e-8", "", "v2-alpha-tpuv6e"),
        ("v99-8", "mine", "mine"),
    ],
)
def test_the_image_is_that_of_the_type(cloud, kind, version, image):
    line = cloud.ready("create", DRY_RUN="1", ACCELERATOR_TYPE=kind, RUNTIME_VERSION=version)
    assert f" --accelerator-type {kind} --runtime-version {image} " in line


def test_create_waits_and_is_safe_to_repeat(cloud):
    assert cloud.ready("create").splitlines() == ["mu: WAITING_FOR_RESOURCES", "mu: ACTIVE"]
    assert cloud.ready("create").splitlines() == ["mu: ACTIVE"]
    assert (cloud.folder / "request").read_text() == "v4-16 tpu-ubuntu2204-base"
    assert [call for call in cloud.calls if " create " in call and "--spot" in call] == []


def test_a_request_that_gets_no_tpu_ends_create(cloud):
    (cloud.folder / "state").write_text("FAILED")
    done = cloud.tpu("create")
    assert done.returncode == 1 and "delete, then create again" in done.stderr


def test_more_flags_reach_gcloud(cloud):
    cloud.ready("create", CREATE_FLAGS="--service-account me --network mine", SPOT="1")
    cloud.ready("install", SSH_FLAGS="--internal-ip")
    by_verb = {call.split()[3]: call for call in cloud.calls}
    assert all(flag in by_verb["create"] for flag in ("--service-account", "--network", "--spot"))
    assert "--internal-ip" in by_verb["scp"] and "--internal-ip" in by_verb["ssh"]


@pytest.mark.slow
def test_the_real_gcloud_takes_every_line(cloud):
    real = shutil.which("gcloud")
    if not real:
        pytest.skip("no gcloud")
    more = {"CREATE_FLAGS": "--service-account me", "SSH_FLAGS": "--internal-ip", "SPOT": "1", "REAL_GCLOUD": real}
    for args in (["create"], ["install"], ["service", "fit"], ["status"], ["log"], ["stop"], ["delete"]):
        cloud.ready(*args, **more, STEPS="0")
    done = cloud.tpu("create", **{**more, "CREATE_FLAGS": "--no-such-flag x"})  # it does look
    assert done.returncode == 1 and "unrecognized arguments" in done.stderr


def test_what_the_documents_run_is_understood(cloud):
    examples = re.findall(r"^#   export .*?(?=^# Variables)", SCRIPT.read_text(), flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "docs" / "tpu.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    text = "".join([re.sub("^#", "", examples[0], flags=re.MULTILINE), *blocks]).replace("\\\n", "")
    lines = [line.strip() for line in text.splitlines() if "scripts/tpu.sh" in line]
    assert len(lines) > 10
    env = {**cloud.env, "DRY_RUN": "1"}
    for line in lines:
        done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith("gcloud "), f"{line}: {done.stderr}"
        assert all((ROOT / config).exists() for config in re.findall(r"--config (\S+)", line)), line


@pytest.mark.parametrize(("name", "precision"), [("tpu", "bf16-mixed"), ("xla_cpu", None)])
def test_an_overlay_names_the_strategy_and_its_settings(name, precision):
    trainer = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["trainer"]
    assert (trainer["accelerator"], trainer.get("precision")) == ("xla", precision)
    module, _, kind = trainer["strategy"]["class_path"].rpartition(".")
    source = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())  # to import it takes seconds
    (strategy,) = (node for node in source.body if isinstance(node, ast.ClassDef) and node.name == kind)
    (init,) = (node for node in strategy.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    assert set(trainer["strategy"]["init_args"]) <= {argument.arg for argument in init.args.args}


# ---- hosts


@pytest.mark.slow
def test_every_host_runs_the_package_that_was_sent(two_hosts):
    two_hosts.use("package")
    two_hosts.ready("install", PIP_OPTIONS="--no-cache-dir")
    shown = two_hosts.ready("run", "describe", "--config", "configs/small.yaml", "--model.decoder.d_model=64")
    assert shown.count("w_query") == 2
    for i in (0, 1):
        first, second = (two_hosts.host(i) / "pip").read_text().splitlines()
        assert first == "-m pip install -q -e .[tpu,gcs]" and second == "-m pip install -q --no-cache-dir -e .[tpu,gcs]"
        assert (two_hosts.host(i) / "mutransformer" / "configs" / "tpu.yaml").exists()


@pytest.mark.slow
def test_every_host_counts_its_devices(two_hosts):
    pytest.importorskip("torch_xla")
    shown = two_hosts.ready("devices", RUN_ENV="PJRT_DEVICE=CPU CPU_NUM_DEVICES=3")
    assert shown.splitlines() == ["3 devices"] * 2


def test_words_reach_the_run_as_they_were_typed(two_hosts):
    words = ["fit", "--data.data_files=a b/*.txt", "it's", "$HOME", '"', "a;b", "100%", "\\n"]
    shown = two_hosts.ready("run", *words, STEPS="0", RUN_ENV="PJRT_DEVICE=CPU")
    assert shown.splitlines() == [f"CPU: {' '.join(words)} from 0"] * 2


def test_a_host_that_fails_is_seen(two_hosts):
    done = two_hosts.tpu("run", "fail")
    assert done.returncode == 2 and done.stdout.count("broken") == 2
    (two_hosts.host(1) / "mutransformer" / ".venv" / "bin" / "mutransformer").unlink()
    assert two_hosts.tpu("run", "fit", STEPS="0").returncode == 127  # of one host alone


# What a launcher's run ends with when it is told to stop: the code of the signal, with its state saved.
LAUNCHERS = [pytest.param("tmux", "none", id="tmux"), pytest.param("service", "stopped", id="service")]


@pytest.mark.parametrize(("launcher", "afterwards"), LAUNCHERS)
def test_a_run_in_the_background_is_watched_and_stopped(two_hosts, launcher, afterwards):
    if launcher == "tmux" and not shutil.which("tmux"):
        pytest.skip("no tmux")
    assert two_hosts.ready("status").split() == ["none", "none"]
    two_hosts.ready(launcher, "fit", "--seed_everything=2")
    two_hosts.wait_for(".third")
    assert two_hosts.ready("status").split() == ["running", "running"]
    second = two_hosts.tpu("run", "fit")
    assert second.returncode == 2 and "a run is under way on this host" in second.stderr
    two_hosts.ready("stop")
    assert two_hosts.ready("status").splitlines() == [afterwards] * 2
    for worker in ("0", "1"):
        log = two_hosts.ready("log", "-n", "5", WORKER=worker)
        assert log.splitlines() == ["TPU: fit --seed_everything=2 from 0", "saved"]


def test_a_service_is_restarted_where_its_command_is_given_anew(two_hosts):
    two_hosts.ready("service", "fit", "--resume=auto")
    two_hosts.wait_for(".third")
    two_hosts.ready("service", "fit", "--resume=auto", STEPS="0")
    assert two_hosts.ready("status").splitlines() == ["exit 0"] * 2
    first, saved, second = two_hosts.ready("log").splitlines()
    assert (first, saved) == ("TPU: fit --resume=auto from 0", "saved")
    assert int(second.removeprefix("TPU: fit --resume=auto from ")) >= 3


def test_the_unit_is_one_that_systemd_takes(two_hosts):
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze")
    two_hosts.ready("service", "fit", STEPS="0")
    unit = two_hosts.host(0) / "etc" / "systemd" / "system" / "mutransformer.service"
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert done.returncode == 0 and "mutransformer" not in done.stderr, done.stderr
    unit.write_text(unit.read_text().replace("RestartSec=30", "RestartSec=soon"))
    assert "mutransformer" in subprocess.run(done.args, capture_output=True, text=True).stderr  # verify does look


# ---- spot


def test_a_preempted_run_goes_on_to_its_end_on_the_next_tpu(cloud):
    (cloud.folder / "preempt").write_text("bucket/host-0.third")
    said = cloud.ready("spot", "fit", "--resume", "auto", STEPS="15")
    states = [line.partition(": ")[2] for line in said.splitlines() if " mu: " in line]
    life = ["to be created", "WAITING_FOR_RESOURCES", "ACTIVE, none"]
    seen = [state for state in states if state != "ACTIVE, running"]  # a busy machine may look too late for it
    assert seen == [*life, "SUSPENDED", *life, "ACTIVE, exit 0"]
    for i in (0, 1):
        first, second = (cloud.folder / "bucket" / f"host-{i}.starts").read_text().splitlines()
        assert first == "TPU: fit --resume auto from 0"
        assert int(second.removeprefix("TPU: fit --resume auto from ")) > 0
        assert (cloud.folder / "bucket" / f"host-{i}").read_text() == "15\n"
    assert sum("--spot" in call for call in cloud.calls) == 2
    assert not (cloud.folder / "state").exists()  # given back


def test_a_node_that_was_preempted_counts_before_its_request_does(two_hosts):
    two_hosts.ready("service", "fit", "--resume=auto")
    (two_hosts.folder / "node").write_text("PREEMPTED")
    watch = subprocess.Popen([str(SCRIPT), "spot", "fit", "--resume=auto"], env=two_hosts.env, stdout=subprocess.PIPE)
    try:
        assert watch.stdout is not None and watch.stdout.readline().endswith(b" mu: SUSPENDED\n")
        assert watch.stdout.readline().endswith(b" mu: to be created\n")
    finally:
        watch.terminate()
        watch.communicate()


def test_spot_begun_again_finds_the_run_that_is_under_way(two_hosts):
    two_hosts.ready("service", "fit", "--resume=auto", STEPS="8")
    two_hosts.ready("spot", "fit", "--resume=auto")
    for i in (0, 1):
        assert len((two_hosts.folder / "bucket" / f"host-{i}.starts").read_text().splitlines()) == 1


def test_a_run_that_fails_on_one_host_is_shown_and_its_tpu_given_back(cloud):
    fails = '[ "$(basename "$HOME")" = host-0 ] || { echo "broken, $*"; exit 2; }; sleep 100'
    (cloud.folder / "bin" / "a_run").write_text(f"#!/bin/bash\n{fails}\n")
    done = cloud.tpu("spot", "fit", "--resume=auto")
    assert done.returncode == 1 and "broken, fit --resume=auto" in done.stdout
    assert "failed, with exit 2" in done.stderr
    assert not (cloud.folder / "state").exists()


def test_a_first_request_that_is_refused_ends_spot(cloud):
    refuses = '[[ $* = *" list "* ]] || { echo no quota >&2; exit 1; }'
    (cloud.folder / "bin" / "gcloud").write_text(f"#!/bin/bash\n{refuses}\n")
    done = cloud.tpu("spot", "fit", "--resume=auto")
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["no quota", "tpu.sh: there is no TPU to wait for"]


@pytest.mark.slow
def test_a_preempted_fit_ends_as_one_that_was_not(cloud):
    cloud.use("package")
    (cloud.folder / "corpus").mkdir()
    corpus = write_corpus(cloud.folder / "corpus")
    slow = ("--trainer.callbacks+=cli_runs.SlowSteps", "--checkpoint.every_n_steps=10")
    env = {"HOSTS": "1", "EXTRA_PATH": str(Path(__file__).parent), "RUN_ENV": "MUTRANSFORMER_CACHE=caches"}
    (cloud.folder / "preempt").write_text("bucket/whole/**/*.ckpt")
    cloud.ready("spot", "fit", *tiny(corpus, cloud.folder / "bucket" / "whole", *slow, "--resume=auto"), **env)
    assert sum("--spot" in call for call in cloud.calls) == 2
    (cloud.folder / "preempt").write_text("never")
    cloud.ready("spot", "fit", *tiny(corpus, cloud.folder / "bucket" / "again", *slow, "--resume=auto"), **env)
    assert sum("--spot" in call for call in cloud.calls) == 3
    newest = [last_checkpoint(cloud.folder / "bucket" / name) for name in ("whole", "again")]
    assert_same_state(*newest)
