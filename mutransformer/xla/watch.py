"""Counts compilations by the kind of step, and says why a step that had its graph got another one."""

from __future__ import annotations

import difflib
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mutransformer.xla import runtime


class RecompilationWarning(UserWarning):
    """A step was compiled again after its first time."""


class CompilationWatch:
    """Knows how often each kind of step was compiled.

    The first step of a kind (training, validation, test) compiles its graph. Any later one that compiles again is
    warned of, with the shape that changed or, for the next such step, the first line of the graph that did.

    Attributes:
        n_by_kind: kind of step -> compilations within its steps.
    """

    def __init__(self) -> None:
        self.n_by_kind: dict[str, int] = defaultdict(int)
        self._shapes: dict[str, Any] = {}
        self._graphs: dict[str, list[str]] = {}  # kind -> text of an earlier graph, once it was compiled again

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
        before = self._shapes.setdefault(kind, shapes)
        text = runtime.graph_text(tensors).splitlines() if kind in self._graphs else None
        n_before = runtime.n_compilations()
        send()
        n_new = runtime.n_compilations() - n_before
        self.n_by_kind[kind] += n_new
        if n_new and not is_first:
            reason = self._reason(kind, before, shapes, text)
            warnings.warn(f"a {kind} step was compiled again: {reason}", RecompilationWarning, stacklevel=3)
        self._shapes[kind] = shapes
        if n_new and not is_first:
            self._graphs[kind] = text or []

    def _reason(self, kind: str, before: Mapping[str, Any], now: Mapping[str, Any], text: list[str] | None) -> str:
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                return f"batch[{name!r}] is {_words(now.get(name))}, before it was {_words(before.get(name))}"
        old = self._graphs.get(kind)
        if not (old and text):
            return "the batch has the same shapes, so a number in the graph changed; the next time says which"
        lines = [line for line in difflib.unified_diff(old, text, lineterm="", n=0) if line[:1] in "+-"][2:]
        return "; ".join(" ".join(line.split())[:160] for line in lines[:2]) or "the graph is the same"


def _words(shape: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if shape is None else f"{shape[1].removeprefix('torch.')} {list(shape[0])}"
