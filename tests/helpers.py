"""Small decoders, batches and trainers that the tests of several rooms share."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loggers import CSVLogger

from mutransformer.model.config import DecoderConfig
from mutransformer.model.decoder import Decoder
from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig
from mutransformer.mup.init import initialize
from mutransformer.mup.plan import Plan, PlanRow
from mutransformer.training.checkpoint import AtomicCheckpointIO
from mutransformer.training.module import DecoderModule
from mutransformer.training.schedule import ScheduleConfig

D_BASE = 16
VOCAB = 17
LENGTH = 8


def small(**changes: Any) -> DecoderConfig:
    """A decoder of the base width: two layers, two heads of eight."""
    return DecoderConfig(**{"d_model": D_BASE, "n_layer": 2, "d_head": 8, "vocab_size": VOCAB, **changes})


def mup(**changes: Any) -> ParametrizationConfig:
    """The parametrization with the small base width."""
    return ParametrizationConfig(**{"d_base": D_BASE, **changes})


def rows_of(
    decoder: DecoderConfig | None = None,
    parametrization: ParametrizationConfig | None = None,
    optimizer: OptimizerConfig | None = None,
) -> dict[str, PlanRow]:
    """The plan's rows by parameter name."""
    plan = (decoder or small()).plan(parametrization or mup(), optimizer or OptimizerConfig())
    return {row.name: row for row in plan.rows}


def plan_of(decoder: DecoderConfig, **parametrization: Any) -> Plan:
    """The plan under AdamW."""
    return decoder.plan(mup(**parametrization), OptimizerConfig())


def make_decoder(
    config: DecoderConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64, **parametrization: Any
) -> Decoder:
    """An initialized decoder, in float64 unless told otherwise."""
    plan = plan_of(config, **parametrization)
    decoder = Decoder(config, plan).to(dtype)
    initialize(dict(decoder.named_parameters()), plan, seed)
    return decoder


def make_module(
    decoder: DecoderConfig | None = None,
    parametrization: ParametrizationConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    schedule: ScheduleConfig | None = None,
    **arguments: Any,
) -> DecoderModule:
    """A module without weights yet; `configure_model` or a trainer makes them."""
    return DecoderModule(
        decoder or small(),
        parametrization or mup(),
        optimizer or OptimizerConfig(),
        schedule or ScheduleConfig(total_steps=100),
        **arguments,
    )


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Standard normals."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def random_tokens(n_rows: int, length: int = LENGTH, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    """tokens_BL, uniform over the vocabulary."""
    return torch.randint(vocab_size, (n_rows, length), generator=torch.Generator().manual_seed(seed))


def random_batch(n_rows: int = 4, length: int = LENGTH, seed: int = 0) -> dict[str, torch.Tensor]:
    """A batch without a mask: `length` targets a row."""
    return {"tokens": random_tokens(n_rows, length + 1, seed)}


class Batches:
    """A loader of ready batches, in order; Lightning would take a plain list for a list of loaders."""

    def __init__(self, *batches: dict[str, torch.Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class Outputs(Callback):
    """Keeps what each training step returned, as numbers."""

    def __init__(self) -> None:
        self.values: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.values.append({name: value.item() for name, value in outputs.items()})


def make_trainer(folder: Path, max_steps: int, callbacks: tuple[Any, ...] = (), **arguments: Any) -> Trainer:
    """A silent trainer on the CPU that writes below `folder` alone."""
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        callbacks=list(callbacks),
        logger=CSVLogger(folder, name=None, flush_logs_every_n_steps=1),
        default_root_dir=folder,
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"log_every_n_steps": 1, "num_sanity_val_steps": 0, "plugins": [AtomicCheckpointIO()], **arguments},
    )


def fit(module: DecoderModule, folder: Path, batches: Iterable[Any], **arguments: Any) -> Trainer:
    """One step for each of `batches`, in float64, without validation; returns the trainer."""
    loader = Batches(*batches)
    trainer = make_trainer(folder, len(loader), **{"precision": "64-true", "limit_val_batches": 0, **arguments})
    trainer.fit(module, loader, Batches(random_batch()))
    return trainer


def write_checkpoint(module: DecoderModule, path: Path) -> Path:
    """A checkpoint as a run would leave it, of a module's weights as they are and without an optimizer's state."""
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict(), "global_step": 0}
    module.on_save_checkpoint(checkpoint)
    torch.save(checkpoint, path)
    return path


def metrics_of(folder: Path, version: int = 0) -> list[dict[str, float]]:
    """The rows of the run's metrics.csv, without what is empty in a row."""
    with (folder / f"version_{version}" / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
