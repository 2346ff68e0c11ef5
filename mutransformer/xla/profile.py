"""A trace of XLA devices, with the interface of torch's profiler."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch_xla.core.xla_model as xm
import torch_xla.debug.profiler as xp


class DeviceTrace:
    """What the devices and the host do between `start` and `stop`; XLA's own trace."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trace-")

    def start(self) -> None:
        xm.wait_device_ops()
        xp.start_trace(self._folder.name)

    def stop(self) -> None:
        xm.wait_device_ops()
        xp.stop_trace()

    def export_chrome_trace(self, path: str) -> None:
        """Writes the trace as gzipped JSON, as Perfetto opens it."""
        (trace,) = Path(self._folder.name).rglob("*.trace.json.gz")
        shutil.move(trace, path)
        self._folder.cleanup()
