"""The runs of a study: each is a point that is trained once, stored under its settings' hash, and never repeated.

A study that is stopped, however it is stopped, goes on with what is left; points of several studies, machines and
shards may lie in one folder.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import multiprocessing as mp
import os
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

import mutransformer
from mutransformer.data.datamodule import TextDataModule
from mutransformer.training.checkpoint import newest_readable
from mutransformer.training.run_checkpoint import RunCheckpoint
from mutransformer.verify.settings import Settings, build_data, build_module, build_trainer, quiet

# parts of the settings that change what a run computes; of the trainer's, these alone
_SECTIONS = ("model", "data", "seed_everything")
_TRAINER = ("max_steps", "precision", "gradient_clip_val", "accumulate_grad_batches", "limit_train_batches")
_CHECK_EVERY_N_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run of a study.

    Args:
        variant: which of the study's curves it belongs to, e.g. `mup` or `sp`.
        changes: dotted key -> value, what it differs in from other points of the variant.
        settings: all of its settings.
    """

    variant: str
    changes: Mapping[str, Any]
    settings: Settings

    @property
    def key(self) -> str:
        """Hash of all that changes what is computed."""
        kept = {name: self.settings[name] for name in _SECTIONS}
        kept["data"] = {name: value for name, value in kept["data"].items() if name != "cache"}
        kept["version"] = mutransformer.__version__
        kept["trainer"] = {name: self.settings["trainer"].get(name) for name in _TRAINER}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came out of a point.

    Args:
        status: `done`; `diverged`, where the loss was not finite; `failed`, where there was an error.
        losses: training loss of each step in nats a token, float32; up to the first that is not finite.
        seconds: wall time of the run.
        error: the last line of the error.
    """

    status: str
    losses: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    seconds: float = 0.0
    error: str = ""

    def final_loss(self) -> float:
        """Mean loss of the last sixth of the run, in nats a token; infinite where the run did not get there."""
        n_last = max(1, len(self.losses) // 6)
        return float(self.losses[-n_last:].mean()) if self.status == "done" else math.inf


class _Losses(Callback):
    """Keeps the loss of each step, and the time, over attempts; ends the run soon after a loss that is not finite."""

    def __init__(self) -> None:
        self._before, self._seconds_before = torch.empty(0), 0.0
        self._new: list[torch.Tensor] = []
        self._start = time.perf_counter()

    @property
    def curve(self) -> torch.Tensor:
        """[steps] float32, on the CPU."""
        new = torch.stack(self._new).float().cpu() if self._new else torch.empty(0)
        return torch.cat([self._before, new])

    @property
    def seconds(self) -> float:
        return self._seconds_before + time.perf_counter() - self._start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._new.append(outputs["loss"])
        if len(self._new) % _CHECK_EVERY_N_STEPS == 0:  # so that an accelerator is not waited for at each step
            recent = torch.stack(self._new[-_CHECK_EVERY_N_STEPS:])
            trainer.should_stop = trainer.should_stop or not bool(torch.isfinite(recent).all())

    def state_dict(self) -> dict[str, Any]:
        return {"curve": self.curve, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._before, self._seconds_before = state_dict["curve"], state_dict["seconds"]


class _KeepSignals(Callback):
    """Leaves SIGINT and SIGTERM to whoever had them: Lightning puts in its own, which end without a word, or not."""

    def __init__(self) -> None:
        self._handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)


def train(point: Point, data: TextDataModule, checkpoints: Path) -> Result:
    """Trains one point, from its checkpoint where an earlier attempt left one.

    Args:
        point: settings of the run.
        data: its data module, whose tokens may be shared with other points.
        checkpoints: folder for checkpoints, written where the settings ask for some before the end of the run.
    """
    settings = point.settings
    losses = _Losses()
    callbacks: list[Callback] = [losses, _KeepSignals()]
    every, n_steps = settings.get("checkpoint", {}).get("every_n_steps", 0), settings["trainer"]["max_steps"]
    if 0 < every < n_steps:
        callbacks.append(RunCheckpoint(every, save_best=False, dirpath=str(checkpoints)))
    last, _ = newest_readable(str(checkpoints))  # where all are damaged, the point begins again
    with quiet():
        module = build_module(settings, data.vocab_size)
        build_trainer(settings, callbacks).fit(module, datamodule=data, ckpt_path=last)
    curve = losses.curve.numpy()
    bad = np.flatnonzero(~np.isfinite(curve))
    if len(bad):
        return Result(status="diverged", losses=curve[: bad[0]], seconds=losses.seconds)
    if len(curve) != n_steps:
        raise RuntimeError(f"ended after {len(curve)} of trainer.max_steps={n_steps} steps")
    return Result(status="done", losses=curve, seconds=losses.seconds)


class Store:
    """The points of a folder: `points/KEY/losses.npy`, and `done.json` written last, the mark of a whole point."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "points"

    def path(self, point: Point) -> Path:
        return self.folder / point.key

    def load(self, point: Point) -> Result | None:
        """The point's result; None where it is not done, or its files are damaged: it is then trained again."""
        folder = self.path(point)
        try:
            done = json.loads((folder / "done.json").read_text())["result"]
            losses = np.load(folder / "losses.npy")
            if losses.ndim != 1 or losses.dtype != np.float32 or done["status"] not in ("done", "diverged"):
                return None
            return Result(status=done["status"], seconds=float(done["seconds"]), losses=losses)
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            return None

    def save(self, point: Point, result: Result) -> None:
        """Keeps a result. A failed point is not marked done: the next run tries it again."""
        if result.status == "failed":
            return
        folder = self.path(point)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "losses.npy", result.losses)
        done = {
            "variant": point.variant,
            "changes": dict(point.changes),
            "result": {"status": result.status, "seconds": result.seconds},
        }
        write_whole(folder / "done.json", json.dumps(done, indent=1) + "\n")
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    os.replace(part, path)


class _Runner:
    """Trains points one after the other; keeps the tokens of the data that several of them share."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._data: dict[str, TextDataModule] = {}

    def __call__(self, point: Point) -> Result:
        try:
            return train(point, self._data_of(point.settings), self._store.path(point) / "checkpoints")
        except Exception as error:  # a point that fails is a row of the table, not the end of the study
            if os.environ.get("MUTRANSFORMER_DEBUG") == "1":
                traceback.print_exc()
            return Result(status="failed", error=f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            gc.collect()  # Lightning's objects refer to each other: the weights would stay for many points

    def _data_of(self, settings: Settings) -> TextDataModule:
        shared = {name: value for name, value in settings["data"].items() if name != "shuffle_seed"}
        key = json.dumps(shared, sort_keys=True)
        if key not in self._data:
            self._data[key] = build_data(settings)
        self._data[key].shuffle_seed = settings["data"]["shuffle_seed"]
        return self._data[key]


def run(points: Sequence[Point], store: Store, n_jobs: int, on_result: Callable[[Point, Result], None]) -> None:
    """Trains all points that are not done; calls `on_result` for each as it ends, done ones first.

    Args:
        points: the study's.
        store: where results are kept.
        n_jobs: processes side by side, which share the machine's cores; 1: this process.
        on_result: called in this process.
    """
    left = []
    for point in points:
        if (result := store.load(point)) is None:
            left.append(point)
        else:
            on_result(point, result)
    for point, result in _in_this_process(left, store) if n_jobs == 1 else _side_by_side(left, store, n_jobs):
        store.save(point, result)
        on_result(point, result)


def _in_this_process(points: Sequence[Point], store: Store) -> Iterable[tuple[Point, Result]]:
    runner = _Runner(store)
    return ((point, runner(point)) for point in points)


def _side_by_side(points: Sequence[Point], store: Store, n_jobs: int) -> Iterable[tuple[Point, Result]]:
    """Hands a point to each worker that has none; a worker that dies fails its point and is replaced."""
    queue = list(points)
    idle = [_Worker(store, n_jobs) for _ in range(min(n_jobs, len(queue)))]
    busy: dict[Any, tuple[_Worker, Point]] = {}
    try:
        while queue or busy:
            while queue and idle:
                worker, point = idle.pop(), queue.pop(0)
                worker.send(point)
                busy[worker.pipe] = worker, point
            for pipe in wait(list(busy)):
                worker, point = busy.pop(pipe)
                if (result := worker.receive()) is not None:
                    idle.append(worker)
                else:
                    worker.process.join()
                    result = Result(status="failed", error=f"its process ended with {worker.process.exitcode}")
                    idle += [_Worker(store, n_jobs)] if queue else []
                yield point, result
    finally:
        for worker in (*idle, *(worker for worker, _ in busy.values())):
            worker.process.terminate()
            worker.process.join()


class _Worker:
    """A process that trains the points it is sent."""

    def __init__(self, store: Store, n_jobs: int) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        n_threads = max(1, _n_cores() // n_jobs)
        self.process = context.Process(target=_work, args=(theirs, store, n_threads), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, point: Point) -> None:
        """Hands over a point; one that is dead is found by `receive`."""
        with suppress(OSError):
            self.pipe.send(point)

    def receive(self) -> Result | None:
        """The point's result; None where the process is dead."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return None


def _n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _end_with_parent() -> None:
    """Ends this process when the study's does, however that ends: nobody would take the result."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(pipe: Connection, store: Store, n_threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study's own process ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    torch.set_num_threads(n_threads)
    runner = _Runner(store)
    while True:
        try:
            pipe.send(runner(pipe.recv()))
        except (EOFError, OSError):  # the study is gone
            return
