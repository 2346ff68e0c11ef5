"""Reading HLO text: computations, instructions, and how often each computation runs in one execution of the program.

Pure text, for dumps of any backend: what XLA:CPU writes after partitioning, what the TPU compiler writes at its end.
Read by `collectives.py` (what is sent) and `flops.py` (what is computed).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

BYTES: Mapping[str, int] = {
    "pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b(" + "|".join(BYTES) + r")\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_KNOWN_TRIPS = re.compile(r'known_trip_count[":{\s]+n"?[":\s]+(\d+)')
_NAME = re.compile(r"%([\w.\-]+)")
_BARE_NAME = re.compile(r"(?:^|, |\*/)\s*([a-zA-Z_][\w.\-]*)(?=,|$)")

# operators whose computation is applied to elements, not run as a part of the program
_ELEMENTWISE = frozenset(
    (
        *("all-reduce", "all-reduce-start", "reduce-scatter"),
        *("map", "reduce", "reduce-window", "scatter", "select-and-scatter", "sort"),
    )
)


@dataclass(frozen=True)
class Shape:
    """One array.

    Args:
        dtype: as HLO names it.
        sizes: of its dimensions, on one device where the program is partitioned.
    """

    dtype: str
    sizes: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return math.prod(self.sizes) * BYTES[self.dtype]


@dataclass(frozen=True)
class Instruction:
    """A line of HLO.

    Args:
        name: without `%`.
        shape_text: its type as written, a tuple's in parentheses.
        op: operator.
        operands: names, in order.
        inside: what stands between the operator's parentheses.
        attributes: what follows them.
        is_root: whether it is the computation's result.
    """

    name: str
    shape_text: str
    op: str
    operands: tuple[str, ...]
    inside: str
    attributes: str
    is_root: bool

    @cached_property
    def shapes(self) -> list[Shape]:
        """The arrays of its type, a tuple's one after the other."""
        return shapes(self.shape_text)

    @property
    def called(self) -> list[str]:
        """Computations that it runs, once each; not a loop's."""
        if self.op in _ELEMENTWISE:
            return []
        branches = (name for names in _BRANCHES.findall(self.attributes) for name in _operands(names))
        return [*_CALLED.findall(self.attributes), *branches]

    def attribute(self, name: str) -> str | None:
        """The word after `name=`, up to a comma or a blank; None where there is none."""
        match = re.search(rf"\b{name}=(\S+?)(?:,\s|,?$|\s)", self.attributes + " ")
        return match[1] if match else None

    @property
    def op_name(self) -> str:
        """Where it came from in the traced program, as its metadata say."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""


def shapes(text: str) -> list[Shape]:
    """The arrays in a type, e.g. `(f32[2,3]{1,0}, s32[])`."""
    return [Shape(dtype, tuple(int(n) for n in sizes.split(",") if n)) for dtype, sizes in _SHAPE.findall(text)]


Computation = Mapping[str, Instruction]


@dataclass(frozen=True)
class Program:
    """A parsed module.

    Args:
        computations: name -> its instructions by name, in order.
        entry: name of the one that is run.
    """

    computations: Mapping[str, Computation]
    entry: str

    @classmethod
    def parse(cls, text: str) -> Program:
        """Reads HLO text.

        Raises:
            ValueError: there is no entry computation, so this is no HLO module.
        """
        computations: dict[str, dict[str, Instruction]] = {}
        entry, current = None, None
        for line in text.splitlines():
            if current is not None and (match := _INSTRUCTION.match(line)):
                inside, attributes = _split_at_parenthesis(match[5])
                name = match[2]
                operands = () if match[4] in ("constant", "parameter") else _operands(inside)
                current[name] = Instruction(name, match[3], match[4], operands, inside, attributes, bool(match[1]))
            elif not line[:1].isspace() and (match := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
                current = computations[match[2]] = {}
                entry = match[2] if match[1] else entry
            elif line.startswith("}"):
                current = None
        if entry is None:
            raise ValueError("no ENTRY computation: this is no HLO text")
        return cls(computations, entry)

    @cached_property
    def executions(self) -> Mapping[str, int]:
        """Computation -> how often it runs; bodies of loops count as often as the loop goes round."""
        count: dict[str, int] = defaultdict(int)
        for name, times in self._runs(self.entry, 1):
            count[name] += times
        return dict(count)

    def _runs(self, name: str, times: int) -> Iterator[tuple[str, int]]:
        yield name, times
        for instruction in self.computations[name].values():
            if instruction.op == "while":
                body = (instruction.attribute("body") or "").lstrip("%")
                yield from self._runs(body, times * self.n_trips(instruction, self.computations[name]))
            else:
                for called in instruction.called:
                    if called in self.computations:
                        yield from self._runs(called, times)

    def n_trips(self, loop: Instruction, around: Computation) -> int:
        """How often a loop goes round.

        Read from the compiler's note, else from `counter < limit` of its condition and the step of its body.

        Raises:
            ValueError: neither is there.
        """
        if match := _KNOWN_TRIPS.search(loop.attributes):
            return int(match[1])
        condition = self.computations[(loop.attribute("condition") or "").lstrip("%")]
        limits = [n for c in self._below(condition) for i in c.values() if (n := _integer(i)) is not None and n > 0]
        if not limits:
            raise ValueError(f"loop {loop.name} has no limit that can be read from its condition")
        return max(1, -(-max(limits) // self._step(condition, loop)))

    def _below(self, computation: Computation) -> Iterator[Computation]:
        yield computation
        for instruction in computation.values():
            for called in instruction.called:
                yield from self._below(self.computations[called])

    def _step(self, condition: Computation, loop: Instruction) -> int:
        """What a loop's body adds to its counter; 1 where it is not seen to add another number."""
        counters = [i for i in condition.values() if i.op == "get-tuple-element"]
        body = self.computations[(loop.attribute("body") or "").lstrip("%")]
        root = next(i for i in body.values() if i.is_root)
        for counter in counters:
            index = counter.attribute("index")
            if index is None or root.op != "tuple":
                continue
            made = body[root.operands[int(index)]]
            while made.op in ("copy", "bitcast") and made.operands:
                made = body[made.operands[0]]
            if made.op == "add":
                steps = [n for name in made.operands if (n := _integer(body[name])) is not None]
                return steps[0] if steps and steps[0] > 0 else 1
        return 1


def _split_at_parenthesis(text: str) -> tuple[str, str]:
    """(what stands before the parenthesis that closes, what follows it)."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return text[:i], text[i + 1 :]
    return text, ""


def _operands(inside: str) -> tuple[str, ...]:
    """Names between an operator's parentheses: with `%`, as compilers print them, or bare, as jax does."""
    return tuple((_NAME if "%" in inside else _BARE_NAME).findall(inside))


def _integer(instruction: Instruction) -> int | None:
    """The value of a whole-number constant."""
    is_scalar = instruction.op == "constant" and re.match(r"[su](32|64)\[\]", instruction.shape_text)
    return int(instruction.inside) if is_scalar and re.fullmatch(r"-?\d+", instruction.inside.strip()) else None
