"""TPU slices by name: how many chips lie how, what a chip can do by its data sheet, and what libtpu calls the slice.

Numbers are Google's, from the pages "TPU v2" to "v6e" of the Cloud TPU documentation, except the usable memory, which
libtpu 0.0.21 states when a program does not fit, and the peak of v2, from arXiv 1907.10701.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mutransformer.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A generation of TPU.

    Args:
        flops_per_s: peak of matrix products in bfloat16; others are made of these unless asked otherwise.
        usable_bytes: high-bandwidth memory that a program can have.
        memory_bytes_per_s: peak to and from that memory.
        link_bytes_per_s: peak of one link in one direction; a chip has two links for each dimension of the torus.
        wraps_from: chips from which a dimension of a slice closes to a ring.
        n_cores: a slice's other name counts these (`v4-32` has 16 chips).
        aliases: how such names begin.
        chips_per_host: where there are several hosts.
        largest_single_host: chips of the largest slice with one host.
        sizes: slices, a shape each.
        options: what libtpu has to be told besides the name.
    """

    flops_per_s: float
    usable_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    wraps_from: int
    n_cores: int
    aliases: tuple[str, ...]
    chips_per_host: int = 4
    largest_single_host: int = 4
    sizes: tuple[str, ...]
    options: Mapping[str, Any]


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")

CHIPS: Mapping[str, Chip] = {
    "v4": Chip(
        flops_per_s=275e12,
        usable_bytes=int(30.75 * GIB),
        memory_bytes_per_s=1228e9,
        link_bytes_per_s=50e9,
        wraps_from=4,
        n_cores=2,
        aliases=("v4",),
        sizes=_CUBES,
        options={"chip_config_name": "megacore"},
    ),
    "v5e": Chip(
        flops_per_s=197e12,
        usable_bytes=int(15.75 * GIB),
        memory_bytes_per_s=819e9,
        link_bytes_per_s=50e9,
        wraps_from=16,
        n_cores=1,
        aliases=("v5litepod", "v5e"),
        largest_single_host=8,
        sizes=_FLAT,
        options={},
    ),
    "v5p": Chip(
        flops_per_s=459e12,
        usable_bytes=int(95.73 * GIB),
        memory_bytes_per_s=2765e9,
        link_bytes_per_s=100e9,
        wraps_from=4,
        n_cores=2,
        aliases=("v5p",),
        sizes=(*_CUBES, "16x16x16"),
        options={},
    ),
    "v6e": Chip(
        flops_per_s=918e12,
        usable_bytes=int(31.24 * GIB),
        memory_bytes_per_s=1638e9,
        link_bytes_per_s=100e9,
        wraps_from=16,
        n_cores=1,
        aliases=("v6e",),
        largest_single_host=8,
        sizes=_FLAT,
        options={},
    ),
}

# peak of one device, which is half a chip there; nothing is planned for these
_OLDER: Mapping[str, float] = {"v2": 45e12 / 2, "v3": 123e12 / 2}


def device_peak(kind: str) -> float | None:
    """Peak operations a second of one TPU device, as torch_xla counts devices, in any precision; None: not known.

    Args:
        kind: generation, or an accelerator type that begins with it, as in "v5p-128".
    """
    prefix = kind.lower().removeprefix("tpu").strip(" -").split("-")[0]
    peaks = (chip.flops_per_s for chip in CHIPS.values() if prefix in chip.aliases)
    return next(peaks, _OLDER.get(prefix))


@dataclass(frozen=True)
class Slice:
    """Chips that are there together.

    Args:
        generation: key of CHIPS.
        shape: chips along each dimension of the torus.
    """

    generation: str
    shape: tuple[int, ...]

    @property
    def chip(self) -> Chip:
        return CHIPS[self.generation]

    @property
    def name(self) -> str:
        """As libtpu knows it, e.g. `v5e:4x4`."""
        return f"{self.generation}:{'x'.join(map(str, self.shape))}"

    @property
    def accelerator(self) -> str:
        """As it is ordered, e.g. `v5litepod-16`."""
        return f"{self.chip.aliases[0]}-{self.n_chips * self.chip.n_cores}"

    @property
    def n_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def n_hosts(self) -> int:
        """Machines, with a process each."""
        return 1 if self.n_chips <= self.chip.largest_single_host else self.n_chips // self.chip.chips_per_host

    @property
    def libtpu_options(self) -> dict[str, Any]:
        """What its topology is made with, besides the name."""
        own = {"chips_per_host_bounds": [1, 1, 1]} if self.n_chips == 1 else {}
        return {**self.chip.options, **own}

    @classmethod
    def parse(cls, text: str) -> Slice:
        """From either name.

        Raises:
            ConfigError: a generation or size that is not in the table.
        """
        known = {slice_.name: slice_ for slice_ in all_slices()}
        if text in known:
            return known[text]
        prefix, _, number = text.rpartition("-")
        for slice_ in known.values():
            count = slice_.n_chips * slice_.chip.n_cores
            if prefix in slice_.chip.aliases and number == str(count):
                return slice_
        names = [*known, *(slice_.accelerator for slice_ in known.values())]
        generation = re.split("[:-]", text)[0]
        near = difflib.get_close_matches(text, names, n=1, cutoff=0.6)
        sizes = ", ".join(slice_.name for slice_ in known.values() if slice_.generation == generation)
        remedy = f"did you mean {near[0]}?" if near else f"use one of {sizes or ', '.join(CHIPS)}"
        raise ConfigError(
            "topology", text, "is not a TPU slice that is known here", f"{remedy} (--topologies lists all)"
        )

    def axis_bytes_per_s(self, rows: int, cols: int) -> dict[str, float]:
        """Bytes that a chip sends each second along mesh axis X and Y, at the links' peak.

        Devices are numbered with the torus's last dimension fastest, columns before rows. On a ring each direction
        carries a half; a dimension that does not close, or of which an axis has a part, is a line, where each direction
        carries all.
        """
        left, speeds = list(self.shape), {}
        for axis, size in (("Y", cols), ("X", rows)):
            speed = 0.0
            while size > 1 and left:
                part = math.gcd(left[-1], size)
                if part > 1:
                    is_ring = part == left[-1] == self.shape[len(left) - 1] and part >= self.chip.wraps_from
                    speed += self.chip.link_bytes_per_s * (2 if is_ring else 1)
                size //= part
                left[-1] //= part
                if left[-1] == 1 or part == 1:
                    left.pop()
            speeds[axis] = speed or self.chip.link_bytes_per_s
        return speeds


def all_slices() -> list[Slice]:
    """Every slice in the table."""
    return [
        Slice(generation, tuple(int(n) for n in size.split("x")))
        for generation, chip in CHIPS.items()
        for size in chip.sizes
    ]


def topologies_table() -> str:
    """All slices as lines for people."""
    lines = [("topology", "ordered as", "chips", "hosts", "GiB/chip", "bf16 TFLOP/s/chip")]
    lines += [
        (
            slice_.name,
            slice_.accelerator,
            str(slice_.n_chips),
            str(slice_.n_hosts),
            f"{slice_.chip.usable_bytes / GIB:g}",
            f"{slice_.chip.flops_per_s / 1e12:g}",
        )
        for slice_ in all_slices()
    ]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
