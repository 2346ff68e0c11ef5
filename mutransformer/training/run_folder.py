"""The run folder, `root/version_n`: its metrics.csv, which a run that goes on continues, and where to go on from.

Read by the command line.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.csv_logs import _ExperimentWriter
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only

from mutransformer.errors import ConfigError
from mutransformer.training.checkpoint import checkpoints_in, load_plain


class RunLogger(CSVLogger):
    """Lightning's CSVLogger, which owns the run folder; it goes on with the metrics.csv of a run that is resumed.

    Args:
        root: folder of all runs.
        version: number of the run folder; None: the next one that is free.
        resumed_step: rows of metrics.csv behind this step are taken out, as the run makes them again.
    """

    def __init__(self, root: str, version: int | None = None, resumed_step: int | None = None) -> None:
        super().__init__(root, name=None, version=version, flush_logs_every_n_steps=1)
        self._resumed_step = resumed_step

    @property
    def experiment(self) -> Any:
        if self._experiment is None and self._resumed_step is not None and rank_zero_only.rank == 0:
            self._experiment = _ContinuingWriter(self.log_dir, self._resumed_step)
        return super().experiment

    def _get_next_version(self) -> int:
        """As Lightning's, which imports gcsfs (60 MB) to ask whether a local folder is on object storage."""
        versions = (path.name.removeprefix("version_") for path in Path(self._root_dir).glob("version_*/"))
        return max((int(version) for version in versions if version.isdigit()), default=-1) + 1


class _ContinuingWriter(_ExperimentWriter):
    """Lightning's writer of metrics.csv; it would delete the file that is there."""

    def __init__(self, log_dir: str, last_step: int) -> None:
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        if not path.is_file():
            return
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if _is_whole(row) and int(row["step"]) <= last_step]
            self.metrics_keys = list(reader.fieldnames or ())
        temporary = path.with_suffix(".csv.tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.metrics_keys)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, path)

    def _check_log_dir_exists(self) -> None:
        """Nothing is deleted."""


def _is_whole(row: dict[Any, Any]) -> bool:
    """Whether a row was written to its end: a process that was killed may leave half of one."""
    return None not in row and None not in row.values() and str(row.get("step")).isdigit()


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a run goes on from.

    Args:
        path: of the checkpoint.
        step: optimizer steps it has made.
        run_folder: where the run's other files are; None: not on this machine any more.
        wandb_id: of its Weights & Biases run, if it has one.
    """

    path: str
    step: int
    run_folder: Path | None
    wandb_id: str | None


def find_checkpoint(
    root: str, dirpath: str | None, difference: Callable[[dict[str, Any]], str | None], say: Callable[[str], None]
) -> Resumed | None:
    """The checkpoint that `fit --resume auto` goes on from: of the newest run of the same configuration, its last.

    Args:
        root: folder of all runs.
        dirpath: folder of checkpoints, where they do not lie in run folders.
        difference: what makes the configuration in a checkpoint another than that of this run; None: nothing.
        say: told what is passed over and why.
    """
    for folder in [dirpath] if dirpath else _checkpoint_folders(Path(root)):
        for path in reversed(checkpoints_in(folder).values()):
            try:
                checkpoint = load_plain(path, tensors=False)
            except ConfigError as error:
                say(f"passed over: {error}")
                continue
            if other := difference(checkpoint["mutransformer"]["config"]):
                say(f"passed over: {path} is of another configuration: {other}")
                break  # and so are the others of this folder
            state = checkpoint.get("callbacks", {})
            run_folder = Path(root, state.get("RunCheckpoint", {}).get("run", "")) if dirpath else Path(folder).parent
            return Resumed(
                path=path,
                step=checkpoint["global_step"],
                run_folder=run_folder if (run_folder / "config.yaml").is_file() else None,
                wandb_id=state.get("WandbId", {}).get("id"),
            )
    return None


def _checkpoint_folders(root: Path) -> Iterator[str]:
    """`checkpoints` of each run folder, the newest first."""
    runs = {int(path.name[8:]): path for path in root.glob("version_*") if path.name[8:].isdigit()}
    return (str(runs[number] / "checkpoints") for number in sorted(runs, reverse=True))
