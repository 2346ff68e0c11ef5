"""The accelerator `xla`: whatever devices torch_xla drives, TPU cores or CPU devices for tests."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

from mutransformer.errors import ConfigError


class XLADevices(Accelerator):
    """All XLA devices of this host, as the one logical device of SPMD.

    Lightning's own accelerator asks for a TPU and picks strategies that torch_xla's SPMD has no use for.
    """

    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        if str(devices) not in ("auto", "1", "-1"):
            rule = "a process drives all devices of its host"
            raise ConfigError("trainer.devices", devices, rule, "use auto; the mesh is trainer.strategy's")
        return 1

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("xla", 0)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return importlib.util.find_spec("torch_xla") is not None

    @staticmethod
    def name() -> str:
        return "xla"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        from mutransformer.xla import runtime

        return {"n_compilations": runtime.n_compilations(), "n_executions": runtime.n_executions()}
