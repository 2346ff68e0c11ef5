"""What runs on XLA devices, or on the CPU for comparison: `python cases.py CASE ARGUMENTS_AS_JSON RESULT_FILE`."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from helpers import Batches, random_tokens
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from mutransformer.errors import ConfigError
from mutransformer.model.config import DecoderConfig
from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig
from mutransformer.training.checkpoint import AtomicCheckpointIO
from mutransformer.training.module import DecoderModule
from mutransformer.training.schedule import ScheduleConfig

N_STEPS = 6
N_ROWS, LENGTH, VOCAB = 32, 16, 64

# Eight heads and 256 features: every mesh of eight devices cuts them. Rounding must not decide anything that is then
# large: no kink as relu's, and an eps that keeps Adam from turning rounding into steps.
SHAPE = {
    "d_model": 64, "n_layer": 2, "d_head": 8, "vocab_size": VOCAB, "sequence_len": LENGTH, "activation": "gelu"
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "unrolled": {"decoder": {"scan_layers": False}},
    "gqa": {"decoder": {"n_kv_head": 4, "qk_norm": True, "norm_gains": "vector"}},
    "mqa": {"decoder": {"n_kv_head": 1, "projection_biases": True, "embedding_norm": True}},
    "swiglu": {"decoder": {"activation": "swiglu", "remat": "dots"}},
    "tied": {"decoder": {"tie_embeddings": True, "remat": "block"}},
    "accumulated": {"module": {"n_micro_batch": 4}},
    "elu": {"decoder": {"attention_activation": "elu", "activation": "elu"}},
    "sgd": {"optimizer": {"algorithm": "sgd", "momentum": 0.9, "weight_decay": 1e-3}},
    "vocabulary": {"strategy": {"shard_vocab": True}},
}


def make_module(variant: str, kind: type[DecoderModule] = DecoderModule, **decoder: Any) -> DecoderModule:
    changes = VARIANTS[variant]
    optimizer = {"eps": 1e-4, "learning_rate": 0.01, **changes.get("optimizer", {})}
    return kind(
        DecoderConfig(**{**SHAPE, **changes.get("decoder", {}), **decoder}),
        ParametrizationConfig(d_base=16),
        OptimizerConfig(**optimizer),
        # from 0 through 1 and back: a rate of exactly 0 or 1 is another number to a compiler than the others
        ScheduleConfig(total_steps=N_STEPS, warmup_steps=2),
        **{"gradient_clip": 0.5, **changes.get("module", {})},
    )


def batches(n: int = N_STEPS, n_rows: int = N_ROWS) -> list[dict[str, torch.Tensor]]:
    return [{"tokens": random_tokens(n_rows, LENGTH + 1, seed, VOCAB)} for seed in range(n)]


class Outputs(Callback):
    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].detach())
        self.norms.append(outputs["grad_norm"].detach())

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return {"loss": torch.stack(self.losses).cpu(), "grad_norm": torch.stack(self.norms).cpu()}


def make_trainer(mesh: list[int] | None, variant: str = "dense", **options: Any) -> Trainer:
    """On a mesh, or on the CPU by plain torch for None."""
    from mutransformer.training.engine import engine_options

    if mesh is None:
        engine: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    else:
        from mutransformer.xla.strategy import SPMDStrategy

        strategy = SPMDStrategy(*mesh, **VARIANTS[variant].get("strategy", {}))
        engine = engine_options("xla", strategy)
    return Trainer(
        **{
            "max_steps": N_STEPS,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            "plugins": [AtomicCheckpointIO()],
            **engine,
            **options,
        }
    )


def weights(module: DecoderModule) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().cpu() for name, parameter in module.decoder.named_parameters()}


def train(mesh: list[int] | None, variant: str = "dense", precision: str = "32-true") -> dict[str, Any]:
    """Losses, norms and final weights of a run."""
    module, outputs = make_module(variant), Outputs()
    trainer = make_trainer(mesh, variant, callbacks=[outputs], precision=precision)
    trainer.fit(module, Batches(*batches()), Batches())
    result = {**outputs.values, "weights": weights(module)}
    if mesh is not None:
        from mutransformer.xla import runtime

        result |= {"n_by_kind": dict(trainer.strategy.watch.n_by_kind), "fallbacks": runtime.fallbacks()}
    return result


def train_all(runs: list[tuple[str, list[int]]], precision: str = "32-true") -> dict[str, Any]:
    """Runs of a variant on a mesh each, in one process."""
    return {f"{variant} {mesh}": train(mesh, variant, precision) for variant, mesh in runs}


def memory(mesh: list[int], variant: str) -> dict[str, list[int]]:
    """Bytes of each parameter and optimizer buffer, in all and on the device that has most of it; read from buffers."""
    from mutransformer.xla.sharding import local_shards

    module = make_module(variant)
    trainer = make_trainer(mesh, variant, max_steps=1)
    trainer.fit(module, Batches(*batches(1)), Batches())
    found = {}
    names = {id(parameter): name for name, parameter in module.decoder.named_parameters()}
    for parameter, state in trainer.optimizers[0].state.items():
        name = names[id(parameter)]
        tensors = {name: parameter, **{f"{name}.{key}": value for key, value in state.items() if key != "step"}}
        for key, tensor in tensors.items():
            shards = local_shards(tensor)
            assert len(shards) == mesh[0] * mesh[1] or tensor.dim() == 0
            found[key] = [tensor.nbytes, max(data.nbytes for data, _ in shards)]
    return found


def evaluate(mesh: list[int] | None) -> dict[str, Any]:
    """Loss over batches of which the last has five rows, and how often the step was compiled."""
    module = make_module("dense")
    trainer = make_trainer(mesh, limit_test_batches=None)
    last = {"tokens": random_tokens(5, LENGTH + 1, 9, VOCAB)}
    trainer.test(module, Batches(*batches(2), last), verbose=False)
    watch = getattr(trainer.strategy, "watch", None)
    n_targets = module.val_loss.n_targets.item()
    return {
        "loss": module.val_loss.compute().item(),
        "n_targets": n_targets,
        "n": dict(watch.n_by_kind) if watch else {},
    }


class NumberInTheGraph(DecoderModule):
    """Plants what a careless change would: a Python number, another one in each step, in the arithmetic."""

    def loss_sum(self, batch: Any) -> torch.Tensor:
        tokens = batch["tokens"].roll(self.global_step + 1, 0)  # a shift is written into the graph as it is
        return super().loss_sum({"tokens": tokens})


def one_process_two_trainers(mesh: list[int]) -> list[float]:
    """A fit on XLA, the same module on the CPU, and another on XLA after one that failed; their validation losses."""
    losses = []
    module = make_module("dense")
    make_trainer(mesh, max_steps=1).fit(module, Batches(*batches(1)), Batches())
    for on, one in ((None, module), (mesh, module), (mesh, make_module("gqa"))):
        trainer = make_trainer(on, limit_val_batches=None)
        trainer.validate(one, Batches(*batches(1)), verbose=False)
        losses.append(one.val_loss.compute().item())
        one.val_loss.reset()
    return losses


def refused(mesh: list[int]) -> list[str]:
    """What does not go with XLA: the errors."""
    found = []
    for options, module in (({"precision": "64-true"}, {}), ({}, {"compile": True})):
        try:
            trainer = make_trainer(mesh, max_steps=1, **options)
            decoder = DecoderModule(**{**make_module("dense").hyper_parameters, **module})
            trainer.fit(decoder, Batches(*batches(1)), Batches())
        except ConfigError as error:
            found.append(str(error))
    return found


def warned(fit: Any) -> list[str]:
    from mutransformer.xla.watch import RecompilationWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit()
    return [str(warning.message) for warning in caught if issubclass(warning.category, RecompilationWarning)]


def planted_number(mesh: list[int]) -> list[str]:
    trainer = make_trainer(mesh)
    module = make_module("dense", NumberInTheGraph)
    return warned(lambda: trainer.fit(module, Batches(*batches()), Batches()))


def odd_batch(mesh: list[int]) -> list[str]:
    trainer = make_trainer(mesh, max_steps=3)
    loader = Batches(*batches(2), *batches(1, n_rows=N_ROWS // 2))
    return warned(lambda: trainer.fit(make_module("dense"), loader, Batches()))


def everything_on(mesh: list[int]) -> dict[str, Any]:
    """Three epochs with all that Lightning does beside the steps; how often what was compiled."""
    from mutransformer.xla import runtime

    with tempfile.TemporaryDirectory() as folder:
        callbacks = [
            TQDMProgressBar(refresh_rate=1),
            LearningRateMonitor(logging_interval="step"),
            ModelCheckpoint(folder, save_last=True, every_n_train_steps=2, save_weights_only=False),
            LogToBar(),
        ]
        trainer = make_trainer(
            mesh,
            callbacks=callbacks,
            max_steps=-1,
            max_epochs=3,
            enable_progress_bar=True,
            enable_checkpointing=True,
            limit_val_batches=2,
            log_every_n_steps=1,
            logger=CSVLogger(folder, flush_logs_every_n_steps=1),
            precision="bf16-mixed",
        )
        module = make_module("accumulated")
        messages = warned(lambda: trainer.fit(module, Batches(*batches()), Batches(*batches(2))))
        checkpoints = sorted(path.name for path in Path(folder).glob("*.ckpt"))
        rows = len((Path(trainer.logger.log_dir) / "metrics.csv").read_text().splitlines())
    watch = trainer.strategy.watch
    return {
        "n_steps": trainer.global_step,
        "n_by_kind": dict(watch.n_by_kind),
        "n_in_all": runtime.n_compilations(),
        "warnings": messages,
        "checkpoints": checkpoints,
        "n_rows": rows,
        "fallbacks": runtime.fallbacks(),
    }


class LogToBar(Callback):
    """Logs as users do: to the progress bar and the logger in each step."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("train_loss", outputs["loss"].item(), prog_bar=True, on_step=True, on_epoch=True)

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        module.log("val_sum", outputs["loss_sum"].item(), prog_bar=True)


class Resumable(Batches):
    """Goes on after the batches that it had given when its state was saved."""

    n_given = 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for batch in self._batches[self.n_given :]:
            self.n_given += 1
            yield batch
        self.n_given = 0

    def state_dict(self) -> dict[str, int]:
        return {"n_given": self.n_given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n_given = state["n_given"]


def resume(mesh: list[int] | None, checkpoint: str | None, n_steps: int, save: str | None) -> dict[str, Any]:
    """Trains up to `n_steps` from a checkpoint, and saves."""
    module, outputs = make_module("gqa"), Outputs()
    trainer = make_trainer(mesh, callbacks=[outputs], max_steps=n_steps)
    trainer.fit(module, Resumable(*batches()), Batches(), ckpt_path=checkpoint)
    if save is not None:
        trainer.save_checkpoint(save)
    return outputs.values


def resumed_everywhere(folder: str) -> dict[str, Any]:
    """A run on (4, 2), the same in two halves, and the second half on (8, 1) and from a plain file."""
    names = {name: f"{folder}/{name}.ckpt" for name in ("whole", "half", "resumed")}
    return {
        "whole": resume([4, 2], None, N_STEPS, names["whole"]),
        "half": resume([4, 2], None, 3, names["half"]),
        "resumed": resume([4, 2], names["half"], N_STEPS, names["resumed"]),
        "on (8, 1)": resume([8, 1], names["half"], N_STEPS, None),
        "from a file": resume([2, 4], f"{folder}/plain.ckpt", N_STEPS, None),
    }


def oracle(path: str, mesh: list[int] | None) -> dict[str, Any]:
    """The run of the reference's file."""
    import reference_parity

    case = reference_parity.single_case(reference_parity.read(Path(path)))
    outputs = Outputs()
    trainer = make_trainer(mesh, callbacks=[outputs], max_steps=len(case.tokens))
    trainer.fit(case.module(), Batches(*(case.batch(tokens) for tokens in case.tokens)), Batches())
    return outputs.values


def partitioned(mesh: list[int], variant: str, precision: str, gathered: str | None = None, **decoder: Any) -> str:
    """Text of the training step as the partitioner leaves it; `gathered`: with a tap that is made whole by mistake."""
    from mutransformer.model import tap

    if gathered is not None:
        marks = tap.ACTIVATIONS[gathered]
        tap.ACTIVATIONS = {**tap.ACTIVATIONS, gathered: (*marks, ("gathered",) * len(marks[0]))}
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_pass_re=.*partition.*"
        os.environ["XLA_FLAGS"] += f" {flags}"  # read when the client starts
        trainer = make_trainer(mesh, variant, max_steps=1, precision=precision)
        trainer.fit(make_module(variant, **decoder), Batches(*batches(1)), Batches())
        dumps = Path(folder).glob("*after_spmd-partitioning*")
        return max((path.read_text() for path in dumps), key=len)


def wrong_sharding(mesh: list[int]) -> str:
    """A parameter that is not cut as the table says: the error."""
    from mutransformer.xla import runtime
    from mutransformer.xla.sharding import ShardingError

    trainer = make_trainer(mesh, max_steps=1)
    trainer.fit(make_module("dense"), Batches(*batches(1)), Batches())
    strategy = trainer.strategy
    runtime.sync(wait=True)
    strategy._specs["w_ff_in"] = (None, None, None)
    try:
        strategy.check_sharding()
    except ShardingError as error:
        return str(error)
    return ""


def lost_mark(mesh: list[int]) -> list[str]:
    """A mark that does not reach the graph: the error; and none for the marks of the model."""
    from mutransformer.xla.sharding import ShardingError

    trainer = make_trainer(mesh, max_steps=1)
    trainer.fit(make_module("dense"), Batches(*batches(1)), Batches())
    graph = trainer.strategy.watch.first_graph("training")
    found = []
    for spec in (None, (None, None, "X", None)):
        if spec is not None:
            trainer.strategy.sharding.marked.add(spec)
        try:
            trainer.strategy.sharding.check_marks(graph)
            found.append("")
        except ShardingError as error:
            found.append(str(error))
    return found


def for_tpu(folder: str) -> tuple[str, list[str]]:
    """What options that are for TPU alone do on CPU devices: the error of one, the warnings of the other."""
    from mutransformer.xla.strategy import SPMDStrategy

    config = make_module("dense").config["decoder"]
    try:
        SPMDStrategy(4, 2, flash_attention=True).check(config, N_ROWS)
    except ConfigError as error:
        refused = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        SPMDStrategy(4, 2, compilation_cache=folder).check(config, N_ROWS)
    return refused, [str(warning.message) for warning in caught]


def command(argv: list[str]) -> int:
    """The command line in this process."""
    from mutransformer.cli import main

    return main(argv)


if __name__ == "__main__":
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    case, arguments, result = sys.argv[1:]
    torch.save(globals()[case](**json.loads(arguments)), result)
