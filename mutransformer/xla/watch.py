"""Counts compilations by the kind of step, and says why a step that had its graph got another one."""

from __future__ import annotations

import difflib
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch

from mutransformer.xla import runtime

Shape = tuple[tuple[int, ...], str]
Shapes = dict[str, Shape]


class RecompilationWarning(UserWarning):
    """A step was compiled again after its first time."""


class CompilationWatch:
    """Knows how often each kind of step was compiled.

    The first step of a kind (training, validation, test) compiles its graph. A later one that compiles again is warned
    of, with the shape that changed; where none did, the graph of the step after it is compared with the first.

    Attributes:
        n_by_kind: kind of step -> compilations within its steps.
    """

    def __init__(self) -> None:
        self.n_by_kind: dict[str, int] = defaultdict(int)
        self._shapes: dict[str, Shapes] = {}
        self._first_graph: dict[str, list[str]] = {}
        self._is_asked: set[str] = set()  # kinds whose next graph is to be compared

    def first_graph(self, kind: str) -> str:
        """HLO text of the first step of a kind."""
        return "\n".join(self._first_graph[kind])

    def summary(self) -> str:
        """How often each kind of step was compiled, in a line."""
        kinds = ", ".join(f"{kind} {n}" for kind, n in self.n_by_kind.items())
        return f"compiled: {kinds}; {runtime.n_compilations()} graphs in all, {runtime.compile_s():.1f} s"

    def step(
        self, kind: str, batch: Mapping[str, torch.Tensor], tensors: list[torch.Tensor], send: Callable[[], None]
    ) -> None:
        """Sends the step's graph by `send`, and looks whether that compiled.

        Args:
            kind: of step, e.g. `training`.
            batch: its input.
            tensors: what the step changes or returns; their graph is the step's.
        """
        shapes = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in batch.items()}
        is_first = kind not in self._shapes
        before = self._shapes.get(kind, shapes)
        self._shapes[kind] = shapes
        graph = runtime.graph_text(tensors).splitlines() if is_first or kind in self._is_asked else None
        if is_first and graph is not None:
            self._first_graph[kind] = graph
        elif graph is not None:
            self._is_asked.discard(kind)
            difference = _difference(self._first_graph[kind], graph)
            _warn(f"the graph of the {kind} step is not that of the first one: {difference}")
        n_before = runtime.n_compilations()
        send()
        n_new = runtime.n_compilations() - n_before
        self.n_by_kind[kind] += n_new
        if not n_new or is_first:
            return
        changed = [
            f"batch[{name!r}] is {_words(shapes.get(name))}, before it was {_words(before.get(name))}"
            for name in sorted(before.keys() | shapes.keys())
            if before.get(name) != shapes.get(name)
        ]
        if not changed:
            self._is_asked.add(kind)
            changed = ["its batch has the same shapes, so a number in its graph changed; the next step says"]
        _warn(f"a {kind} step was compiled again: {'; '.join(changed)}")


def _warn(message: str) -> None:
    warnings.warn(message, RecompilationWarning, stacklevel=1)


def _difference(first: list[str], now: list[str]) -> str:
    """The first lines that differ, as computed before numbering: names of instructions are left out."""
    old, new = ([re.sub(r"\.\d+", "", line) for line in text] for text in (first, now))
    lines = [line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:1] in "+-"][2:]
    return "; ".join(" ".join(line.split())[:200] for line in lines[:4]) or "it is the same now"


def _words(shape: Shape | None) -> str:
    return "missing" if shape is None else f"{shape[1].removeprefix('torch.')} {list(shape[0])}"
