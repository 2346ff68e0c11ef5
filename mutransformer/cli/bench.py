"""`mutransformer bench`: how long the step of a configuration takes here."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from mutransformer.training.module import COMPUTE_DTYPES, DecoderModule
from mutransformer.training.run_metrics import n_devices
from mutransformer.training.throughput import MfuConvention, flops_per_token, peak_flops_per_s, utilization


class StepClock(Callback):
    """Times each step to the moment when the device has done it; unlike in a fit, every step is waited for.

    Attributes:
        step_s: seconds of each step, reading its batch included.
    """

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self._mark = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for value in outputs.values():
            value.item()  # the loss and the norm come from the forward and the backward pass
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        now = time.perf_counter()
        self.step_s.append(now - self._mark)
        self._mark = now


class RandomBatches:
    """One batch of random tokens, again and again: no text is read."""

    def __init__(self, n_rows: int, sequence_len: int, vocab_size: int, n_batches: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batch = {"tokens": torch.randint(vocab_size, (n_rows, sequence_len + 1), generator=generator)}
        self._n_batches = n_batches

    def __len__(self) -> int:
        return self._n_batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (self._batch for _ in range(self._n_batches))


def compilations(trainer: Trainer) -> list[float]:
    """Seconds of each compilation so far in this process, by torch.compile or by the engine's own compiler."""
    if of_engine := getattr(trainer.strategy, "compilations", None):
        return of_engine()
    from torch._dynamo.utils import compilation_time_metrics

    return list(compilation_time_metrics.get("_compile.compile_inner", []))


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory used so far: the device's where it has its own, else that of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def bench(
    trainer: Trainer,
    model: DecoderModule,
    datamodule: Any,
    *,
    warmup: int,
    steps: int,
    synthetic: bool,
    convention: MfuConvention,
) -> dict[str, Any]:
    """Runs the trainer's own steps and returns what they took.

    Args:
        trainer: with a StepClock among its callbacks; runs warmup + steps steps.
        model: to train.
        datamodule: gives the batches, or only their size.
        warmup: steps that are not counted.
        steps: steps that are.
        synthetic: random tokens instead of the datamodule's.
        convention: see `flops_per_token`.
    """
    clock = next(callback for callback in trainer.callbacks if isinstance(callback, StepClock))  # type: ignore[attr-defined]
    n_rows, n_compiled = datamodule.tokens_per_batch // datamodule.sequence_len, len(compilations(trainer))
    if synthetic:
        rows_here = n_rows // trainer.world_size
        batches = RandomBatches(rows_here, datamodule.sequence_len, datamodule.vocab_size, warmup + steps)
        trainer.fit(model, train_dataloaders=batches, val_dataloaders=batches)
    else:
        trainer.fit(model, datamodule=datamodule)
    compiled, device = compilations(trainer)[n_compiled:], next(model.parameters()).device
    warm = clock.step_s[warmup:]
    deciles = statistics.quantiles(warm, n=10, method="inclusive") if len(warm) > 1 else warm * 9
    median_s = statistics.median(warm)
    dtype = COMPUTE_DTYPES[str(trainer.precision)] or next(model.parameters()).dtype
    flops = flops_per_token(model.config["decoder"], model.plan, convention)
    speed = datamodule.tokens_per_batch / median_s
    peak = peak_flops_per_s(device, dtype)
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "n_devices": n_devices(trainer),
        "precision": str(trainer.precision),
        "n_parameters": model.plan.count,
        "tokens_per_step": datamodule.tokens_per_batch,
        "data": "random tokens" if synthetic else datamodule.source.dataset,
        "n_steps": len(warm),
        "step_s_median": median_s,
        "step_s_p10": deciles[0],
        "step_s_p90": deciles[-1],
        "tokens_per_s": speed,
        "mfu_convention": convention,
        "flops_per_token": flops,
        "peak_flops_per_s": peak,
        "mfu": None,
        **utilization(speed, flops, peak, n_devices(trainer)),
        "first_step_s": clock.step_s[0],
        "n_compilations": len(compiled),
        "compile_s": sum(compiled),
        "peak_memory_bytes": peak_memory_bytes(device),
    }


def table(result: dict[str, Any]) -> str:
    """The result as lines for people."""
    mfu = "unknown: no peak is known of this device" if result["mfu"] is None else f"{result['mfu']:.1%}"
    step = f"{result['step_s_median']:.4g} s (10 % to 90 %: {result['step_s_p10']:.4g} to {result['step_s_p90']:.4g})"
    lines = {
        "device": f"{result['n_devices']} x {result['device']}, {result['precision']}",
        "model": f"{result['n_parameters']:,} parameters",
        "data": f"{result['data']}, {result['tokens_per_step']:,} tokens a step",
        "step": f"{step}, over {result['n_steps']} steps",
        "speed": f"{result['tokens_per_s']:,.0f} tokens/s, {result['tflops_per_s']:.4g} TFLOP/s",
        f"MFU ({result['mfu_convention']})": mfu,
        "first step": f"{result['first_step_s']:.4g} s",
        "compilations": f"{result['n_compilations']}, {result['compile_s']:.4g} s",
        "peak memory": f"{result['peak_memory_bytes'] / 2**30:.3g} GiB",
    }
    return "\n".join(f"{name:<14} {text}" for name, text in lines.items())
