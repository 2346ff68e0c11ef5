"""Real writer processes that are killed, interrupted, or two at once."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from own_process import OwnProcesses

SMALL = {"mutransformer.data.writer:SHARD_TOKENS": 2000, "mutransformer.data.reader:DOCUMENTS_PER_BATCH": 4}
N_FILES = 400


@pytest.fixture(scope="module")
def processes():
    return OwnProcesses({})


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    draw = random.Random(0)
    for i in range(N_FILES):
        (folder / f"{i:03d}.txt").write_bytes(draw.randbytes(draw.randrange(400)))
    return folder


@pytest.fixture(scope="module")
def start(processes, texts):
    def start_writer(cache: Path):
        options = ("--data.dataset=text", f"--data.data_files={texts}/*.txt", f"--data.cache={cache}")
        return processes.start("prepare", *options, "--data.validation_fraction=0.2", patches=SMALL, hurry=False)

    return start_writer


def content_of(root: Path) -> dict[str, bytes]:
    """All files but the lock: a writer that is killed behind its last file leaves it, beside a complete cache."""
    files = [path for path in root.rglob("*") if path.is_file() and path.name != "lock.json"]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory) -> dict[str, bytes]:
    """The files of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process, connection = start(folder)
    ended = connection.recv()
    process.join()
    assert ended.code == 0, ended
    content = content_of(folder)
    assert len([name for name in content if name.endswith(".npy")]) > 60
    return content


def wait_for(condition) -> None:
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("did not happen in 20 s")


@pytest.mark.parametrize("n_kills, seed", [(4, 1), pytest.param(40, 2, marks=pytest.mark.slow)])
def test_killed_writer_is_continued_to_the_same_bytes(n_kills, seed, start, undisturbed, tmp_path):
    """kill -9 at random moments while shards are written; a cache that is finished is compared and begun again."""
    draw, cache, n_killed = random.Random(seed), tmp_path / "cache", 0
    while n_killed < n_kills:
        n_shards = n_shards_in(cache) + draw.randrange(20)
        process, connection = start(cache)
        while n_shards_in(cache) < n_shards and process.is_alive():
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.01))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
        if process.exitcode == -signal.SIGKILL:
            n_killed += 1
        else:
            assert connection.recv().code == 0
            assert content_of(cache) == undisturbed
            shutil.rmtree(cache)
    process, connection = start(cache)
    assert connection.recv().code == 0
    process.join()
    assert content_of(cache) == undisturbed


def n_shards_in(cache: Path) -> int:
    return sum(1 for _ in cache.glob("*/*/*.npy"))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_in_a_line_and_the_same_command_goes_on(signum, start, undisturbed, tmp_path):
    process, connection = start(tmp_path)
    wait_for(lambda: any(tmp_path.glob("*/progress.json")))
    os.kill(process.pid, signum)
    ended = connection.recv()
    process.join()
    assert ended.code == 128 + signum, ended
    assert ended.out.startswith(f"\n{signal.Signals(signum).name}: stopped; ")
    assert "are kept in" in ended.out and ended.out.endswith("the same command goes on from there\n")
    assert not any(tmp_path.glob("*/lock.json")) and not any(tmp_path.glob("*/manifest.json"))
    process, connection = start(tmp_path)
    assert connection.recv().code == 0
    process.join()
    assert content_of(tmp_path) == undisturbed


def test_two_writers_at_once_make_one_cache(start, undisturbed, tmp_path):
    both = [start(tmp_path) for _ in range(2)]
    ended = [connection.recv() for _, connection in both]
    for process, _ in both:
        process.join()
    assert [one.code for one in ended] == [0, 0], ended
    pids = [process.pid for process, _ in both]
    waited = [one.err for one in ended if "waiting for" in one.err]
    assert len(waited) == 1 and any(f"process {pid} on " in waited[0] for pid in pids)
    assert content_of(tmp_path) == undisturbed
