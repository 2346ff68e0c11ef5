"""What a partitioned program sends between devices: collectives by kind and mesh axis, counted from its text.

    collectives(text, rows=4, cols=2)[("all-gather", "X")].count

Pure text. XLA:CPU writes a reduce-scatter as an all-reduce of which each device takes its slice, and so does the TPU
compiler, inside a fusion; it is counted as what it is. What is expected of a layout is in `communication.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mutransformer.xla.hlo import Computation, Instruction, Program, Shape

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_FORMS = {form: kind for kind in KINDS for form in (kind, f"{kind}-start")} | {"ragged-all-to-all": "all-to-all"}
# what may stand between an all-reduce and the slice of it that a device takes
_PASSES_ON = ("bitcast", "copy", "convert", "get-tuple-element", "reshape", "transpose")

Key = tuple[str, str]  # kind, mesh axis


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind over one mesh axis, in one execution of the program.

    Args:
        count: operations, each round of a loop one.
        result_bytes: size of the results on one device, of all together.
        wire_bytes: bytes that one device sends, by the algorithm on a ring.
    """

    count: int = 0
    result_bytes: int = 0
    wire_bytes: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(
            self.count + other.count, self.result_bytes + other.result_bytes, self.wire_bytes + other.wire_bytes
        )

    def times(self, n: int) -> Sent:
        return Sent(self.count * n, self.result_bytes * n, self.wire_bytes * n)


@dataclass(frozen=True)
class Collective:
    """One collective in the text.

    Args:
        kind: one of KINDS.
        axis: `X`, `Y` or `XY`: the mesh axes along which its devices differ; empty: each device is alone.
        n_devices: devices that take part in one group.
        n_runs: how often it runs.
        shapes: its results on one device.
        op_name: where it came from in the traced program.
    """

    kind: str
    axis: str
    n_devices: int
    n_runs: int
    shapes: tuple[Shape, ...]
    op_name: str = ""

    @property
    def sent(self) -> Sent:
        n_bytes = sum(shape.n_bytes for shape in self.shapes)
        return Sent(1, n_bytes, wire_bytes(self.kind, n_bytes, self.n_devices)).times(self.n_runs)


def wire_bytes(kind: str, result_bytes: float, n_devices: int) -> float:
    """Bytes that each of `n_devices` on a ring sends for a collective with a result of so many bytes on each."""
    if n_devices < 2:
        return 0.0
    others = n_devices - 1
    factor = {
        "all-gather": others / n_devices,
        "reduce-scatter": float(others),
        "all-reduce": 2 * others / n_devices,
        "all-to-all": others / n_devices,
        "collective-permute": 1.0,
    }[kind]
    return factor * result_bytes


def collectives(text: str, rows: int, cols: int, min_bytes: int = 0) -> dict[Key, Sent]:
    """(kind, mesh axis) -> what is sent in one execution.

    Args:
        text: HLO partitioned over rows * cols devices, of which `r * cols + c` is at row r (X) and column c (Y).
        rows: size of X.
        cols: size of Y.
        min_bytes: leave out those with smaller results on a device, such as a norm's.
    Raises:
        ValueError: no HLO, or a loop whose length cannot be read.
    """
    total: dict[Key, Sent] = {}
    for one in listed(text, rows, cols):
        if one.axis and sum(shape.n_bytes for shape in one.shapes) >= min_bytes:
            total[one.kind, one.axis] = total.get((one.kind, one.axis), Sent()) + one.sent
    return dict(sorted(total.items()))


def listed(text: str, rows: int, cols: int) -> list[Collective]:
    """Every collective that the text has, one an operation; see `collectives`."""
    program = Program.parse(text)
    found, seen = [], set()
    for name, n_runs in program.executions.items():
        computation = program.computations[name]
        for instruction in computation.values():
            if (kind := _FORMS.get(instruction.op)) is None:
                continue
            # an asynchronous fusion is written several times, with one channel
            channel = instruction.attribute("channel_id")
            if channel is not None and (kind, channel) in seen:
                continue
            seen.add((kind, channel))
            groups = _groups(instruction, rows * cols)
            shapes = _results(instruction)
            n_devices = max(map(len, groups), default=1)
            if kind == "all-reduce" and (slices := _slices(computation, instruction, n_devices)):
                kind, shapes = "reduce-scatter", slices
            axis = _axis(groups, cols)
            found.append(Collective(kind, axis, n_devices, n_runs, tuple(shapes), instruction.op_name))
    return found


def _results(instruction: Instruction) -> list[Shape]:
    """The arrays it makes; one that is started has its arguments in its type too."""
    shapes = instruction.shapes
    if instruction.op in ("all-gather-start", "collective-permute-start"):
        arrays = [shape for shape in shapes if shape.sizes]
        return arrays[len(arrays) // 2 :]
    return shapes


def _slices(computation: Computation, reduced: Instruction, n_devices: int) -> list[Shape]:
    """Slices, a share of 1 / n_devices, that are all that is used of an all-reduce; else nothing."""
    users = list(_users(computation, reduced))
    slices = [user.shapes[0] for user in users if user.op == "dynamic-slice"]
    whole = sum(shape.n_bytes for shape in reduced.shapes)
    is_scattered = slices and len(slices) == len(users) and sum(s.n_bytes for s in slices) * n_devices == whole
    return slices if is_scattered else []


def _users(computation: Computation, made: Instruction) -> Iterator[Instruction]:
    for instruction in computation.values():
        if made.name in instruction.operands:
            if instruction.op in _PASSES_ON and not instruction.is_root:
                yield from _users(computation, instruction)
            else:
                yield instruction


def _groups(instruction: Instruction, n_all: int) -> list[list[int]]:
    """Devices that exchange with each other."""
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", instruction.attributes + "}"):
        both = [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{(\d+,\d+)", pairs[1])]
        return [[a, b] for a, b in both if a != b]
    text = instruction.attributes
    if listed_groups := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", text):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed_groups[1])]
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else [] for part in iota.groups())
        ids = _transposed(dims, order or range(len(dims)))
        size = shape[-1]
        return [ids[i : i + size] for i in range(0, len(ids), size)]
    return [list(range(n_all))]


def _transposed(dims: list[int], order: Iterable[int]) -> list[int]:
    """0, 1, ... in an array of sizes `dims`, read with its dimensions in another order."""
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    ids = [0]
    for dim in order:
        ids = [i + n * strides[dim] for i in ids for n in range(dims[dim])]
    return ids


def _axis(groups: Iterable[list[int]], cols: int) -> str:
    """Mesh axes along which devices of one group differ."""
    axes = set()
    for group in groups:
        axes |= {"X"} if len({device // cols for device in group}) > 1 else set()
        axes |= {"Y"} if len({device % cols for device in group}) > 1 else set()
    return "".join(sorted(axes))


def table(total: Mapping[Key, Sent]) -> str:
    """The counts as lines for people: kind, axis, count, MiB of results on a device."""
    lines = [
        f"{kind:<19} {axis:<2} {sent.count:>6}  {sent.result_bytes / 2**20:>10.3f} MiB"
        for (kind, axis), sent in total.items()
    ]
    return "\n".join(lines)
