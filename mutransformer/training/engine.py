"""Which engine a run has: plain torch as Lightning places it, or torch_xla's SPMD on TPU and other XLA devices."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.cli import instantiate_class
from lightning.pytorch.strategies import Strategy

from mutransformer.errors import ConfigError

STRATEGY_CLASS = "mutransformer.xla.strategy.SPMDStrategy"
_XLA = ("xla", "tpu")


def engine_options(accelerator: Any, strategy: Any) -> dict[str, Any]:
    """What Lightning's Trainer is given in place of `trainer.accelerator` and `trainer.strategy`.

    Args:
        accelerator: `trainer.accelerator`; `tpu` and `xla` are torch_xla's devices, and `auto` is where there is a TPU.
        strategy: `trainer.strategy`: a name, an object, or the class and arguments of one as in a config.
    Returns:
        Options of the Trainer; none where Lightning's own choice holds.
    Raises:
        ConfigError: XLA was asked for and torch_xla is not installed, a TPU and there is none, or one device and the
            strategy of another.
    """
    if isinstance(strategy, dict):
        strategy = instantiate_class((), strategy)
    is_spmd = type(strategy).__name__ == "SPMDStrategy" or strategy in ("xla_spmd", STRATEGY_CLASS)
    is_xla = accelerator in _XLA or (accelerator == "auto" and (is_spmd or (strategy == "auto" and _has_tpu())))
    if is_spmd and not is_xla:
        raise ConfigError("trainer.accelerator", accelerator, f"is not what {STRATEGY_CLASS} drives", "use xla")
    if not is_xla:
        _do_not_look_for_tpus()
        return {"strategy": strategy}
    if not is_spmd and strategy != "auto":
        raise ConfigError("trainer.strategy", strategy, f"does not drive {accelerator}", "use auto, or xla_spmd")
    if importlib.util.find_spec("torch_xla") is None:
        remedy = 'pip install "mutransformer[tpu]", or mutransformer[xla] for CPU devices'
        raise ConfigError("trainer.accelerator", accelerator, "needs torch_xla", remedy)
    # with PJRT_DEVICE=TPU torch_xla itself says why a TPU cannot be opened; without, it would take the CPU in its place
    if accelerator == "tpu" and os.environ.get("PJRT_DEVICE") != "TPU" and not _has_tpu():
        raise ConfigError("trainer.accelerator", "tpu", "there is no TPU here", "use xla for CPU devices, or auto")
    from mutransformer.xla.accelerator import XLADevices
    from mutransformer.xla.strategy import SPMDStrategy

    return {
        "accelerator": XLADevices(),
        "strategy": strategy if isinstance(strategy, Strategy) else SPMDStrategy(),
        "inference_mode": False,  # its tensors cannot be marked
    }


def mode_of(trainer: Trainer, is_compiled: bool) -> str:
    """What a run computes on and how, e.g. `cpu with 2 threads, 32-true, eager`."""
    device = type(trainer.accelerator).__name__.removesuffix("Accelerator").lower()
    if isinstance(trainer.accelerator, CPUAccelerator):
        device += f" with {torch.get_num_threads()} threads"
    how = "one program a step" if device.startswith("xla") else "torch.compile" if is_compiled else "eager"
    return f"{device}, {trainer.precision}, {how}"


def _has_tpu() -> bool:
    if importlib.util.find_spec("torch_xla") is None or not _has_device_of_google():
        return False
    from lightning.pytorch.accelerators import XLAAccelerator

    return XLAAccelerator.is_available()


def _has_device_of_google() -> bool:
    """Whether one is on the PCI bus, as every TPU is: asked before torch_xla is imported to look for one."""
    return any(path.read_text().strip() == "0x1ae0" for path in Path("/sys/bus/pci/devices").glob("*/vendor"))


def _do_not_look_for_tpus() -> None:
    """Keeps Lightning from importing torch_xla, 100 MB and half a second, to log that there is no TPU."""
    from lightning.fabric.accelerators.xla import _XLA_AVAILABLE

    if not _has_device_of_google() and not hasattr(_XLA_AVAILABLE, "available"):
        _XLA_AVAILABLE.available, _XLA_AVAILABLE.message = False, "there is no TPU"
