"""Which checkpoints a run has, when they are written and which are kept.

A checkpoint is never overwritten: it has its step's name, and an older one goes once a newer one is complete. A path is
a file or a folder; the strategy's CheckpointIO writes and removes it, in the background where it can.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from mutransformer.errors import ConfigError
from mutransformer.training.checkpoint import checkpoint_name, checkpoints_in, remove_unfinished


class RunCheckpoint(Checkpoint):
    """Writes `step_N.ckpt` to the run folder's `checkpoints/`; `last.ckpt` and `best.ckpt` lead to the newest and best.

    One is written every `every_n_steps`, after each validation and at the end. Best is the lowest validation loss.

    Args:
        every_n_steps: optimizer steps between two checkpoints; 0: none but the best and that of the end.
        save_best: keep the checkpoint with the lowest validation loss.
        keep_last: how many of the newest are kept; at least 1.
        keep_every: also write and keep for good one every so many steps; 0: none.
        save_async: write in the background, from a copy in the CPU's memory, where the engine can.
        dirpath: folder, local or `gs://...`, where there are no `last.ckpt` and `best.ckpt`; null: `checkpoints` in the
            run folder.
    """

    def __init__(
        self,
        every_n_steps: int = 500,
        save_best: bool = True,
        keep_last: int = 1,
        keep_every: int = 0,
        save_async: bool = True,
        dirpath: str | None = None,
    ) -> None:
        self.every_n_steps = every_n_steps
        self.save_best = save_best
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.save_async = save_async
        self.dirpath = dirpath
        for name, value, least, remedy in (
            ("every_n_steps", every_n_steps, 0, "use 0 for the best and the end alone"),
            ("keep_every", keep_every, 0, "use 0 for none"),
            ("keep_last", keep_last, 1, "use 1: the newest is always kept"),
        ):
            if value < least:
                rule = f"must be at least {least}" if least else "must not be negative"
                raise ConfigError(f"checkpoint.{name}", value, rule, remedy)
        self.best_loss = float("inf")
        self.best_step: int | None = None
        self.last_path: str | None = None
        self._paths: dict[int, str] = {}  # complete ones in dirpath by step, in the order in which they were written
        self._begun: int | None = None  # step of the one being written
        self._saved_step = -1
        self._has_stepped = False
        self._owes_validation = False  # the newest checkpoint is from a step whose validation had not ended
        self._run = ""  # name of the run folder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.dirpath is None:
            self.dirpath = str(Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints")
        self._run = Path(trainer.log_dir or "").name
        if stage == "fit" and trainer.is_global_zero:
            remove_unfinished(self.dirpath)
            self._paths = checkpoints_in(self.dirpath)

    def save(self, trainer: Trainer, *, owes_validation: bool = False) -> None:
        """Writes the checkpoint of the present step, or begins to, unless it was written already.

        Args:
            trainer: that is training.
            owes_validation: what resumes from it is to validate first.
        """
        step = trainer.global_step
        if self._saved_step != step:
            self.settle(trainer)
            self._owes_validation = owes_validation
            trainer.save_checkpoint(f"{self.dirpath}/{checkpoint_name(step)}", weights_only=False)
            self._saved_step = self._begun = step
            self._settle_if_written(trainer)

    def save_and_settle(self, trainer: Trainer) -> str | None:
        """Writes the checkpoint of the present step, whatever Lightning was about to do, and waits until it is there.

        Returns:
            Its path.
        """
        self.save(trainer, owes_validation=_validation_follows(trainer))
        return self.settle(trainer)

    def settle(self, trainer: Trainer) -> str | None:
        """Waits until the newest checkpoint is complete; returns its path, None where there is none.

        Raises:
            SaveError: it could not be written.
        """
        if self._begun is not None:
            step, self._begun = self._begun, None
            getattr(trainer.strategy.checkpoint_io, "wait", lambda: None)()
            self._paths.pop(step, None)
            self.last_path = self._paths[step] = f"{self.dirpath}/{checkpoint_name(step)}"
            self._link_and_prune(trainer)
        return self.last_path

    def _settle_if_written(self, trainer: Trainer) -> None:
        if not getattr(trainer.strategy.checkpoint_io, "is_writing", False):
            self.settle(trainer)

    def _link_and_prune(self, trainer: Trainer) -> None:
        """Points to the newest and the best, then removes what no rule keeps; called when the newest is complete."""
        newest = list(self._paths)[-self.keep_last :]
        best = [self.best_step] if self.save_best and self.best_step in self._paths else []
        if trainer.is_global_zero:
            for name, step in (("last.ckpt", newest[-1]), *(("best.ckpt", step) for step in best)):
                _point(f"{self.dirpath}/{name}", checkpoint_name(step))
        for step, path in list(self._paths.items()):
            if step not in (*newest, *best) and not (self.keep_every and step % self.keep_every == 0):
                try:
                    trainer.strategy.remove_checkpoint(path)
                except Exception as error:  # whatever the store raises: an old checkpoint too many stops no training
                    warnings.warn(f"{path} could not be removed ({error})", stacklevel=2)
                del self._paths[step]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._owes_validation:
            _validate(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._has_stepped = True
        self._settle_if_written(trainer)
        is_due = trainer.global_step == trainer.max_steps or self._is_multiple(trainer.global_step)
        if is_due and not _validation_follows(trainer):  # else what it measures would be missing from the checkpoint
            self.save(trainer)

    def _is_multiple(self, step: int) -> bool:
        return any(n and step % n == 0 for n in (self.every_n_steps, self.keep_every))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self.settle(trainer)  # by the best so far: it goes when the new one is complete, not before
        loss = trainer.callback_metrics.get("val_loss")
        is_best = self.save_best and loss is not None and bool(loss < self.best_loss)
        if is_best:
            self.best_loss, self.best_step = float(loss), trainer.global_step  # type: ignore[arg-type]
        if is_best or self.every_n_steps or self._is_multiple(trainer.global_step):
            self._saved_step = -1  # one from before the validation, if a signal came within it, is written anew
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._has_stepped:
            self.save(trainer)
        self.settle(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "owes_validation": self._owes_validation,
            "run": self._run,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best_loss, self.best_step = state_dict["best_loss"], state_dict.get("best_step")
        self._owes_validation = state_dict.get("owes_validation", False)


def _validation_follows(trainer: Trainer) -> bool:
    """Whether Lightning validates after this step; it has no public way to ask."""
    loop = trainer.fit_loop
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)  # type: ignore[arg-type]


def _validate(trainer: Trainer) -> None:
    """Validates as Lightning does after a step; a run that resumes there would go on with the next step."""
    connector, loop = trainer._logger_connector, trainer.fit_loop.epoch_loop.val_loop
    trainer.validating, loop.restarting, is_first = True, False, connector._first_loop_iter
    loop.run()
    trainer.training, connector._first_loop_iter = True, is_first


def _point(link: str, target: str) -> None:
    """Makes a local `link` lead to `target` beside it, at once; object stores have no links."""
    if "://" in link:
        return
    temporary = f"{link}.tmp"
    Path(temporary).unlink(missing_ok=True)
    os.symlink(target, temporary)
    os.replace(temporary, link)
