"""XLA on CPU devices: Lightning against a bare loop, compile time by depth, one device against plain torch.

    python benchmarks/xla.py [--compile]      # ratios in one run, interleaved; prints a table, then JSON

Processes of their own, as the number of devices is fixed when a process starts; compiled as users would have it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SHAPE = {"d_model": 256, "n_layer": 4, "d_head": 32, "vocab_size": 512, "sequence_len": 256, "activation": "gelu"}
N_ROWS = 8


def make_module(**shape: Any) -> Any:
    """A module of SHAPE with changes."""
    from mutransformer.model.config import DecoderConfig
    from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig
    from mutransformer.training.module import DecoderModule
    from mutransformer.training.schedule import ScheduleConfig

    return DecoderModule(
        DecoderConfig(**{**SHAPE, **shape}),
        ParametrizationConfig(),
        OptimizerConfig(),
        ScheduleConfig(total_steps=10_000),
        gradient_clip=1.0,
    )


class Loader:
    """The same batch again and again."""

    def __init__(self, module: Any, n: int) -> None:
        import torch

        config = module.config["decoder"]
        self.batch = {"tokens": torch.randint(config.vocab_size, (N_ROWS, config.sequence_len + 1))}
        self.n = n

    def __iter__(self) -> Any:
        return iter([self.batch] * self.n)

    def __len__(self) -> int:
        return self.n


def lightning_loop(mesh: list[int] | None, n_steps: int, on_step: Callable[[], None], **shape: Any) -> Any:
    """Trains under Lightning's Trainer, on a mesh or by plain torch."""
    from lightning.pytorch import Callback, Trainer

    from mutransformer.training.engine import engine_options

    class OnStep(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            on_step()

    if mesh is None:
        engine: dict[str, Any] = {"accelerator": "cpu"}
    else:
        from mutransformer.xla.strategy import SPMDStrategy

        engine = engine_options("xla", SPMDStrategy(*mesh))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = Trainer(max_steps=n_steps, callbacks=[OnStep()], limit_val_batches=0, **engine, **quiet)
    module = make_module(**shape)
    trainer.fit(module, Loader(module, n_steps), Loader(module, 0))
    return module


def bare_loop(mesh: list[int], n_steps: int, on_step: Callable[[], None], **shape: Any) -> None:
    """The same step without Lightning: decoder, marks, optimizer, one sync."""
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs

    from mutransformer.model.axes import marking
    from mutransformer.training.optimizer import build_optimizer, clip_by_global_norm
    from mutransformer.xla import runtime, sharding
    from mutransformer.xla.mesh import MeshShape
    from mutransformer.xla.scan import ScannedLayers
    from mutransformer.xla.sharding import Sharding

    n_devices = runtime.start()
    layout = Sharding(MeshShape.of(*mesh, n_devices))
    sharding.activate(layout)
    module = make_module(**shape)
    module.configure_model()
    decoder = module.decoder.to(runtime.device())
    for name, parameter in decoder.named_parameters():
        layout.shard(parameter.data, layout.spec(parameter, decoder.axes[name]))
    decoder.run_layers = ScannedLayers("none")
    optimizer = build_optimizer(decoder.named_parameters(), module.plan, module.optimizer_config)
    spec = xs.ShardingSpec(layout.mesh, ("X", None))
    with marking(layout.mark):
        for batch in Loader(module, n_steps):
            tokens = xm.send_cpu_data_to_device([batch["tokens"]], runtime.device(), spec)[0]
            optimizer.zero_grad(set_to_none=True)
            loss_sum = module.loss_sum({"tokens": tokens})
            (loss_sum / tokens[:, 1:].numel()).backward()
            clip_by_global_norm(decoder.parameters(), 1.0)
            optimizer.step()
            runtime.sync()
            on_step()
    sharding.activate(None)


def wait() -> None:
    """Until the devices are done."""
    import torch_xla.core.xla_model as xm

    xm.wait_device_ops()


def step_s(loop: Callable[..., Any], mesh: list[int] | None, n_steps: int, **shape: Any) -> dict[str, float]:
    """Median seconds from step to step, host seconds in a step, CPU seconds a step; the first ones left out."""
    walls: list[float] = []
    last = [time.perf_counter(), time.process_time()]
    cpu: list[float] = []

    def on_step() -> None:
        if mesh is not None:
            wait()
        now = [time.perf_counter(), time.process_time()]
        walls.append(now[0] - last[0])
        cpu.append(now[1] - last[1])
        last[:] = now

    loop(mesh, n_steps, on_step, **shape)
    skip = n_steps // 3
    return {"step_s": statistics.median(walls[skip:]), "cpu_s": statistics.median(cpu[skip:])}


def case_lightning(n_rounds: int) -> dict[str, Any]:
    """A tiny model, where what is around the step shows most, and one whose step is long; rounds interleaved."""
    found = {}
    for name, shape in (("small step", {"d_model": 64, "d_head": 8, "sequence_len": 32}), ("long step", {})):
        rounds = []
        for _ in range(n_rounds):
            bare = step_s(bare_loop, [4, 2], 24, **shape)
            ours = step_s(lightning_loop, [4, 2], 24, **shape)
            rounds.append({"bare": bare, "lightning": ours})
        found[name] = {
            "bare_step_s": statistics.median(r["bare"]["step_s"] for r in rounds),
            "lightning_step_s": statistics.median(r["lightning"]["step_s"] for r in rounds),
            "ratio": statistics.median(r["bare"]["step_s"] / r["lightning"]["step_s"] for r in rounds),
        }
    return found


def case_compile(n_layer: int, scan: bool) -> dict[str, float]:
    """Compile seconds of the training step, host seconds to trace one, at a depth."""
    from mutransformer.xla import runtime

    before: list[float] = []
    traces: list[float] = []
    original = runtime.sync

    def sync(wait: bool = False) -> None:
        traces.append(time.perf_counter())
        original(wait)

    runtime.sync = sync
    starts: list[float] = []

    def on_step() -> None:
        wait()
        starts.append(time.perf_counter())
        if not before:
            before.append(runtime.compile_s())

    shape = {"n_layer": n_layer, "d_model": 64, "d_head": 8, "sequence_len": 32, "scan_layers": scan}
    lightning_loop([4, 2], 8, on_step, **shape)
    # from the end of a step to its graph being sent: batch, forward, backward, clip and optimizer, all on the host
    trace = statistics.median(t - s for s, t in zip(starts[2:], traces[-len(starts) + 2 :], strict=False) if t > s)
    return {"compile_s": before[0], "trace_s": trace}


def case_one_device(n_rounds: int) -> dict[str, Any]:
    """XLA on one CPU device against plain torch, the same step."""
    from mutransformer.xla import runtime

    runtime.start()
    rounds = [(step_s(lightning_loop, [1, 1], 12), step_s(lightning_loop, None, 12)) for _ in range(n_rounds)]
    tokens = N_ROWS * SHAPE["sequence_len"]
    return {
        "xla_tokens_per_s": tokens / statistics.median(x["step_s"] for x, _ in rounds),
        "torch_tokens_per_s": tokens / statistics.median(t["step_s"] for _, t in rounds),
        "ratio": statistics.median(t["step_s"] / x["step_s"] for x, t in rounds),
        "cpu_ratio": statistics.median(t["cpu_s"] / x["cpu_s"] for x, t in rounds),
    }


def in_own_process(n_devices: int, case: str, **arguments: Any) -> dict[str, Any]:
    """What `case_CASE` finds in a process with so many CPU devices."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(n_devices), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, __file__, "--case", case, json.dumps(arguments)]
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs the cases and prints what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="also compile time at 4, 16 and 48 layers (minutes)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        import logging
        import warnings

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="lightning")
        found = globals()[f"case_{options.case[0]}"](**json.loads(options.case[1]))
        found["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(json.dumps(found))
        return
    results = {"Lightning over a bare loop, mesh (4, 2)": in_own_process(8, "lightning", n_rounds=options.rounds)}
    results["XLA on one CPU device over plain torch"] = in_own_process(1, "one_device", n_rounds=options.rounds)
    if options.compile:
        for scan in (True, False):
            for n_layer in (4, 16, 48):
                key = f"{n_layer} layers, {'scan' if scan else 'unrolled'}"
                results[key] = in_own_process(8, "compile", n_layer=n_layer, scan=scan)
    for name, found in results.items():
        print(name)
        for key, value in found.items():
            print(f"  {key}: {value}")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
