"""Runs a function of `cases.py` in a process of its own, with XLA's CPU devices: their number is fixed when it starts.

Every test of a session that asks for the same run gets the same result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent


def environment(n_devices: int, **more: str) -> dict[str, str]:
    """That of a process with `n_devices` CPU devices; code is compiled without optimization, which takes a third."""
    return {
        **os.environ,
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(n_devices),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_cpu_enable_fast_math=false",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1] / "scripts"), *_inherited()]),
        **more,
    }


def _inherited() -> list[str]:
    path = os.environ.get("PYTHONPATH")
    return [path] if path else []


def run(n_devices: int, case: str, **arguments: Any) -> Any:
    """What `cases.CASE(**arguments)` returns; its tensors and plain values come back through a file."""
    return _run(n_devices, case, json.dumps(arguments, sort_keys=True))


@cache
def _run(n_devices: int, case: str, arguments: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.pt"
        command = [sys.executable, str(HERE / "cases.py"), case, arguments, str(result)]
        done = subprocess.run(command, env=environment(n_devices), text=True, capture_output=True, timeout=500)
        assert done.returncode == 0, f"{case} {arguments}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        return torch.load(result, weights_only=True)
