"""What a command says at its end, and what it leaves in the run folder: the model card, the list of evaluations."""

from __future__ import annotations

import csv
import io
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import lightning
import torch
from lightning.pytorch import Trainer

import mutransformer
from mutransformer.cli.describe import totals
from mutransformer.data.storage import Folder
from mutransformer.errors import DataError, SaveError
from mutransformer.training.module import DecoderModule
from mutransformer.training.run_checkpoint import RunCheckpoint
from mutransformer.training.run_metrics import Metrics, scores

EVALUATIONS = "evaluations.csv"


def loss_line(trainer: Trainer, name: str, loss: float | None, split: str = "validation") -> str:
    """A loss in nats a token, its perplexity and, where the data can tell its bytes, bits a byte."""
    if loss is None:
        return f"{name}: not measured in this run"
    found = scores(trainer, loss, split)
    bits = f", {found['bits_per_byte']:.4f} bits a byte" if "bits_per_byte" in found else ""
    return f"{name}: {loss:.4f} nats a token, perplexity {found['perplexity']:.4g}{bits}"


def fit_summary(trainer: Trainer, metrics: Metrics, checkpoint: RunCheckpoint, folder: Path) -> str:
    """The last lines of a fit: losses, speed, files, the next command."""
    last, lines = metrics.last, [""]
    if checkpoint.last_path is None:
        lines.append("no step was made: the run was complete, or its limits leave no room for one")
    else:
        lines += [
            loss_line(trainer, "train loss", last.get("train_loss"), "train"),
            loss_line(trainer, "validation loss", last.get("val_loss")),
            f"speed: {metrics.tokens_per_s:,.0f} tokens/s",
            f"data: {cast(Any, trainer).datamodule.epoch_summary()}",
            *([watch.summary()] if (watch := getattr(trainer.strategy, "watch", None)) else []),
            f"run folder: {folder} (README.md, metrics.csv, config.yaml, loss.png)",
            f"checkpoint: {checkpoint.last_path}",
            f"next: mutransformer validate --ckpt_path {checkpoint.last_path}",
        ]
    return "\n".join(lines)


def run_folder_of(checkpoint: str) -> str:
    """The folder of the run that a checkpoint is of: where it lies, or above its `checkpoints`."""
    above = checkpoint.rpartition("/")[0] or "."
    return (above.rpartition("/")[0] or ".") if above.rpartition("/")[2] == "checkpoints" else above


def record_evaluation(checkpoint: str, command: str, row: Mapping[str, Any]) -> str:
    """Adds a line to `evaluations.csv` in the run folder of a checkpoint.

    Args:
        checkpoint: path, local or of a store.
        command: `validate` or `test`.
        row: what was measured.
    Returns:
        Where it was written, or why it was not: what was measured has been printed, and is not to be lost for this.
    """
    folder = run_folder_of(checkpoint)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    new = {"time": now, "command": command, "checkpoint": checkpoint, **row}
    try:
        store = Folder(folder)
        try:
            rows = list(csv.DictReader(io.StringIO(store.read(EVALUATIONS).decode())))
        except FileNotFoundError:
            rows = []
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(dict.fromkeys(name for each in (*rows, new) for name in each)))
        writer.writeheader()
        writer.writerows([*rows, new])
        store.write(EVALUATIONS, text.getvalue().encode())
    except (DataError, SaveError) as error:
        return f"not written to {EVALUATIONS}: {error}"
    return f"written to {folder}/{EVALUATIONS}"


CARD = """\
# {name}

A decoder-only transformer of {count:,} parameters ({count_non_embedding:,} without embedding and unembedding), trained
by mutransformer in the parametrization `{rules}` for {step:,} optimizer steps.

| | |
| --- | --- |
{losses}
| tokens trained on | {n_tokens:,} |
| speed | {speed:,.0f} tokens/s on {device} |

## Model

| | |
| --- | --- |
{model}

`config.yaml` has every setting; `mutransformer describe --config config.yaml` prints the plan, a row a parameter.

## Data

{data}

## How it was made

```bash
{command}
```

{versions}

## Use

```bash
mutransformer validate --ckpt_path {checkpoint}
```
"""


def model_card(
    trainer: Trainer,
    metrics: Metrics,
    checkpoint: RunCheckpoint,
    folder: Path,
    *,
    module: DecoderModule,
    config: Any,
    args: list[str],
) -> str:
    """The text of the run folder's README.md.

    Args:
        trainer: after the fit.
        metrics: of the run.
        checkpoint: of the run.
        folder: of the run.
        module: that was trained.
        config: all settings, as nested plain values.
        args: the command line after `mutransformer`.
    """
    data, last = config["data"], metrics.last
    decoder, parametrization = module.config["decoder"], module.config["parametrization"]
    optimizer, schedule = module.optimizer_config, module.schedule
    rows = {
        "layers x width": f"{decoder.n_layer} x {decoder.d_model}, {decoder.n_head} heads of {decoder.d_head}",
        "feed-forward": f"{decoder.activation}, {decoder.ff_multiple:g} x the width",
        "vocabulary, sequence": f"{decoder.vocab_size:,} tokens, {decoder.sequence_len:,} positions",
        "base width": f"{parametrization.d_base:g} (width multiple {decoder.d_model / parametrization.d_base:g})",
        "optimizer": f"{optimizer.algorithm}, learning rate {optimizer.learning_rate:g} at the base width, "
        f"{schedule.kind} schedule, {schedule.warmup_steps} warm-up steps",
        "precision": str(trainer.precision),
        "in float32": f"{totals(module.plan)['bytes_float32'] / 2**20:,.1f} MiB",
    }
    files = f" ({data['data_files']})" if data.get("data_files") else ""
    source = f"`{data['dataset']}`{files}, tokenizer `{data['tokenizer']}`, {data['tokens_per_batch']:,} tokens a step"
    losses = {
        "train loss": loss_line(trainer, "", last.get("train_loss"), "train"),
        "validation loss": loss_line(trainer, "", last.get("val_loss")),
    }
    if checkpoint.best_step is not None:
        losses["lowest validation loss"] = (
            f": {checkpoint.best_loss:.4f} nats a token, at step {checkpoint.best_step:,}"
        )
    return CARD.format(
        name=folder.name,
        rules=parametrization.rules,
        step=trainer.global_step,
        losses="\n".join(f"| {name} | {text.removeprefix(': ')} |" for name, text in losses.items()),
        n_tokens=metrics.n_tokens,
        speed=metrics.tokens_per_s,
        device=_device_name(trainer),
        model="\n".join(f"| {name} | {text} |" for name, text in rows.items()),
        data=f"{source}; {cast(Any, trainer).datamodule.epoch_summary()}.",
        command=shlex.join(["mutransformer", *args]),
        versions=", ".join(f"{name} {version}" for name, version in _versions().items()) + f"; {platform.platform()}.",
        checkpoint=checkpoint.last_path,
        **{name: totals(module.plan)[name] for name in ("count", "count_non_embedding")},
    )


def _versions() -> dict[str, str]:
    return {
        "mutransformer": mutransformer.__version__,
        "torch": str(torch.__version__),
        "lightning": str(lightning.__version__),
        "python": platform.python_version(),
    }


def _device_name(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()
    return f"{trainer.world_size} x {name}" if trainer.world_size > 1 else name


def warn(text: str) -> None:
    """Says what is no error, where errors are said."""
    print(f"warning: {text}", file=sys.stderr)


def write_whole(path: Path, text: str) -> None:
    """Writes a file under another name and renames it: there is the old one or the new one, never half of one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
