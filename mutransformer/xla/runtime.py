"""The torch_xla client of this process: started once, in SPMD mode, before any tensor is on a device."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics
import torch_xla.runtime as xr


def start() -> int:
    """Starts the client, one process a host that drives all its devices; returns the number of devices of all hosts.

    A backward pass on the CPU before the client exists breaks every later one on the device, so this comes first.
    """
    if not xr.is_spmd():
        xr.use_spmd()
    return xr.global_runtime_device_count()


def keep_compiled(folder: str) -> None:
    """Keeps compiled graphs in a folder for later runs; CPU devices cannot read them back, so there it only warns.

    Args:
        folder: made if it is missing; on a shared disk each host has a folder of its own below it.
    """
    if xr.device_type() != "TPU":
        warnings.warn(
            f"trainer.strategy.compilation_cache: {xr.device_type()} devices cannot read back what they compiled, so "
            "nothing is kept",
            stacklevel=2,
        )
        return
    if not torch_xla._XLAC._xla_computation_cache_is_initialized():  # once a process
        xr.initialize_cache(f"{folder}/host-{xr.process_index()}")


def device() -> torch.device:
    """The one logical device of the mesh."""
    return torch_xla.device()


def sync(wait: bool = False) -> None:
    """Ends the graph: sends what was recorded to the devices.

    Args:
        wait: until it is done.
    """
    torch_xla.sync(wait=wait)


def after(first: Iterable[torch.Tensor], then: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`then` again, with which the compiled program begins once it has `first`."""
    later = [tensor.clone() for tensor in then]
    xm.optimization_barrier_([*first, *later])
    return later


def n_compilations() -> int:
    """Graphs compiled by this process so far."""
    data = xla_metrics.metric_data("CompileTime")
    return 0 if data is None else data[0]


def n_executions() -> int:
    """Graphs sent to the devices by this process so far."""
    data = xla_metrics.metric_data("ExecuteTime")
    return 0 if data is None else data[0]


def compilations() -> list[float]:
    """Seconds of each compilation so far; torch_xla remembers the newest thousand or so."""
    data = xla_metrics.metric_data("CompileTime")
    return [] if data is None else [nanoseconds / 1e9 for _, nanoseconds in data[2]]


def compile_s() -> float:
    """Seconds spent in compilation so far."""
    data = xla_metrics.metric_data("CompileTime")
    return 0.0 if data is None else data[1] / 1e9


def fallbacks() -> dict[str, int]:
    """Operators that ran on the CPU as XLA lacks them -> times; none is expected.

    Reading a scalar is counted under this name by torch_xla and is none.
    """
    names = [name for name in xla_metrics.counter_names() if name.startswith("aten::")]
    return {name: xla_metrics.counter_value(name) for name in names if name != "aten::_local_scalar_dense"}


def graph_text(tensors: list[torch.Tensor]) -> str:
    """HLO text of the graph that computes the tensors, not yet sent."""
    return torch_xla._XLAC._get_xla_tensors_hlo(tensors)
