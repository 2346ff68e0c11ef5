"""Runs of the command line in a process of its own, forked from one that has imported everything: 0.1 s, not 6."""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

PRELOADED = ["mutransformer.cli.run", "mutransformer.data.rows", "datasets", "transformers", "tokenizers"]


@dataclass(frozen=True)
class Ended:
    """How a run ended: exit code, and what it printed."""

    code: int
    out: str
    err: str


class OwnProcesses:
    """Starts `mutransformer ARGS` in processes whose environment is `environment`, on top of this one's.

    Args:
        environment: read by libraries when they are imported, so the same for all processes.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            self.run("--version")  # the process to fork from is made now
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def start(self, *args: str, patches: Mapping[str, Any] | None = None, hurry: bool = True) -> tuple[Any, Connection]:
        """Returns the process and where it sends how it ended.

        Args:
            args: of the command line.
            patches: "module:name" -> value that it gets there.
            hurry: waits between attempts take a thousandth of their time.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_main, args=(args, dict(patches or {}), hurry, theirs))
        process.start()
        theirs.close()
        return process, ours

    def run(self, *args: str, **options: Any) -> Ended:
        """Runs it to its end."""
        process, connection = self.start(*args, **options)
        ended = connection.recv()
        process.join()
        return ended


def _main(args: tuple[str, ...], patches: dict[str, Any], hurry: bool, connection: Connection) -> None:
    from mutransformer.cli import main

    for place, value in patches.items():
        module, _, name = place.partition(":")
        setattr(importlib.import_module(module), name, value)
    if hurry:
        sleep = time.sleep
        time.sleep = lambda seconds: sleep(seconds / 1000)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(list(args))
    connection.send(Ended(code, out.getvalue(), err.getvalue()))
