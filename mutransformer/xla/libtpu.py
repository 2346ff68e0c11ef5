"""Compilation for a slice that is not there: runs `compile_slice.py` where libtpu is, and reads what comes out."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mutransformer.errors import ConfigError
from mutransformer.xla.slices import Slice

if TYPE_CHECKING:
    from mutransformer.xla.aot import Lowered

# the extra `plan` in pyproject.toml: what torch_xla 2.9.0 goes with; private interfaces of all three are used
VERSIONS: Mapping[str, str] = {"jax": "0.7.1", "jaxlib": "0.7.1", "libtpu": "0.0.21"}
PYTHON = "MUTRANSFORMER_PLAN_PYTHON"

_SCRIPT = Path(__file__).with_name("compile_slice.py")
_VERSIONS_OF = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
_UNITS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "": 1}
_TOO_LARGE = re.compile(
    r"Allocation \(size=(\d+)\) would exceed memory .*?shape = '([^{']*).*?tag = 'output of ([^@']+)", re.DOTALL
)
_ALLOCATION = re.compile(r"Size: ([\d.]+)([BKMG]?)\n.*?Shape: (\w+\[[\d,]*\]).*?XLA label: (\S+)", re.DOTALL)


class CompilationError(RuntimeError):
    """The TPU compiler refused a step for another reason than memory; the message is the compiler's."""


@dataclass(frozen=True)
class Buffer:
    """A temporary.

    Args:
        name: of the instruction that makes it.
        n_bytes: with padding, on one chip.
        shape: HLO's.
    """

    name: str
    n_bytes: int
    shape: str


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What the compiler said.

    Args:
        argument_bytes: of the program's arguments on one chip, padded; 0 where it ran out of memory.
        in_place_bytes: of them, what results take the place of: weights and optimizer state.
        unaliased_bytes: results that take no argument's place.
        temporary_bytes: most that is needed besides at once.
        buffers: largest first.
        is_complete: it compiled; else memory ran out while it did.
        traced: HLO before partitioning.
        optimized: HLO after everything, of one chip; empty where it did not compile.
        compile_s: seconds.
        peak_rss_bytes: of the compiling process.
        versions: of jax and libtpu.
    """

    argument_bytes: int
    in_place_bytes: int
    unaliased_bytes: int
    temporary_bytes: int
    buffers: tuple[Buffer, ...]
    is_complete: bool
    traced: str
    optimized: str
    compile_s: float
    peak_rss_bytes: int
    versions: Mapping[str, str]


def find_python(given: str | None = None) -> str:
    """The interpreter that has the compiler: the one given, that of the environment variable, or this one.

    Raises:
        ConfigError: it has not; the message says what to install.
    """
    python = given or os.environ.get(PYTHON) or sys.executable
    try:
        answer = subprocess.run([python, "-I", "-c", _VERSIONS_OF], capture_output=True, text=True, check=True)
        found = {name.lower(): version for name, version in json.loads(answer.stdout).items()}
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError) as error:
        raise ConfigError("compiler_python", python, "is no Python that runs", "give the path of one") from error
    wrong = [f"{name} {found.get(name, 'missing')}" for name, version in VERSIONS.items() if found.get(name) != version]
    if wrong:
        pins = " ".join(f"{name}=={version}" for name, version in VERSIONS.items())
        raise ConfigError(
            "compiler_python",
            python,
            f"lacks the compiler ({', '.join(wrong)})",
            f"pip install 'mutransformer[plan]', or python3.12 -m venv plan && plan/bin/pip install {pins} and "
            "--compiler_python plan/bin/python; --analytic needs none",
        )
    return python


def compile_for(lowered: Lowered, slice_: Slice, python: str, effort: float | None = None) -> Compiled:
    """Compiles a step for a slice, in a process of its own.

    Args:
        lowered: from `aot.AbstractDevices.lower`, for as many devices as the slice has chips.
        slice_: the target.
        python: from `find_python`.
        effort: the compiler's, from -1 (fast) to 1; None: as it compiles for a run.
    Raises:
        CompilationError: it failed otherwise than for want of memory.
    """
    request = {
        "topology": slice_.name,
        "options": slice_.libtpu_options,
        "n_devices": slice_.n_chips,
        "effort": effort,
        "arguments": [dataclasses.asdict(argument) for argument in lowered.arguments],
        "results": lowered.results,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "step.pb").write_bytes(lowered.hlo)
        (folder / "request.json").write_text(json.dumps(request))
        done = subprocess.run(
            [python, "-I", str(_SCRIPT), str(folder)], capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode:
            raise CompilationError(f"exit {done.returncode}: {' '.join(done.stderr.split())[-2000:]}")
        result = json.loads((folder / "result.json").read_text())
        if "error" in result:
            raise CompilationError(result["error"][:2000])
        texts = [file.read_text() if file.exists() else "" for file in (folder / "step.hlo", folder / "optimized.hlo")]
    return _read(result, *texts)


def _read(result: Mapping[str, Any], traced: str, optimized: str) -> Compiled:
    message = result.get("out_of_memory")
    if message is None:
        memory = result["memory"]
        sizes = (memory["argument"], memory["alias"], memory["output"] - memory["alias"], memory["temp"])
        buffers = tuple(Buffer(one["name"], one["bytes"], one["shape"]) for one in result["buffers"])
    else:
        sizes, buffers = (0, 0, 0, used_bytes(message)), allocations(message)
    return Compiled(
        argument_bytes=sizes[0],
        in_place_bytes=sizes[1],
        unaliased_bytes=sizes[2],
        temporary_bytes=sizes[3],
        buffers=buffers,
        is_complete=message is None,
        traced=traced,
        optimized=optimized,
        compile_s=result["compile_s"],
        peak_rss_bytes=result["peak_rss_bytes"],
        versions=result["versions"],
    )


def used_bytes(message: str) -> int:
    """What a program wanted, by libtpu's words when memory ran out; arguments are not in it.

    Where one buffer alone is larger than the memory, libtpu names that one and stops.

    Raises:
        CompilationError: the message has another form.
    """
    if match := re.search(r"Used ([\d.]+)([KMGB]?) of", message):
        return int(float(match[1]) * _UNITS[match[2]])
    if match := _TOO_LARGE.search(message):
        return int(match[1])
    raise CompilationError(message[:2000])


def allocations(message: str) -> tuple[Buffer, ...]:
    """The largest buffers that libtpu lists when memory ran out."""
    if match := _TOO_LARGE.search(message):
        return (Buffer(match[3], int(match[1]), match[2]),)
    return tuple(
        Buffer(label, int(float(number) * _UNITS[unit]), shape)
        for number, unit, shape, label in _ALLOCATION.findall(message)
    )
