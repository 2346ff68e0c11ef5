"""Weights & Biases as a logger beside metrics.csv: `--trainer.logger=wandb`. wandb is imported when the run begins."""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

INIT_TIMEOUT_S = 30.0
FINISH_TIMEOUT_S = 60.0


class WandbRun(WandbLogger):
    """Lightning's WandbLogger that never holds up a run: without a key or a server it writes files to be synced later.

    Metrics are drawn over `trainer/global_step`, the count of optimizer steps; every row has `tokens` too, which can be
    chosen instead. Only the first process logs.

    Args:
        project: of Weights & Biases.
        group: runs that belong together.
        name: shown; null: one that Weights & Biases makes up.
        tags: of the run; null: none.
        id: of the run; a run with this id goes on. Null: that of the run that `--resume auto` goes on with, else a new
            one.
        entity: user or team; null: the user's own.
        offline: write to the run folder alone, to be sent by `wandb sync`; null: where there is no API key, unless
            `WANDB_MODE` says otherwise.
    """

    def __init__(
        self,
        project: str = "mutransformer",
        group: str | None = None,
        name: str | None = None,
        tags: list[str] | None = None,
        id: str | None = None,
        entity: str | None = None,
        offline: bool | None = None,
    ) -> None:
        super().__init__(name=name, project=project, id=id, group=group, tags=tags, entity=entity)
        self._is_offline_wanted = offline

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of wandb; begins where it is first asked for."""
        if self._experiment is not None:
            return self._experiment
        import wandb

        settings = {"init_timeout": INIT_TIMEOUT_S, "finish_timeout": FINISH_TIMEOUT_S, "silent": True}
        own = [name for name in settings if f"WANDB_{name.upper()}" in os.environ]
        known = {name: settings[name] for name in settings.keys() & wandb.Settings.model_fields.keys() - set(own)}
        self._wandb_init.pop("anonymous", None)  # Lightning's, of which wandb says that it has no effect
        self._wandb_init.update(mode=_mode(self._is_offline_wanted), settings=wandb.Settings(**known))
        try:
            return super().experiment
        except wandb.Error as error:
            reason = str(error).splitlines()[0]
            print(f"warning: wandb cannot be reached and goes on offline ({reason})", file=sys.stderr)
            self._wandb_init["mode"] = "offline"
            return super().experiment

    @rank_zero_only
    def start(
        self, folder: Path, resumed_id: str | None, config: Mapping[str, Any], plan: list[dict[str, Any]]
    ) -> None:
        """Begins the run, or goes on with it, and sends what is known before the first step.

        Args:
            folder: the run folder, for wandb's own files.
            resumed_id: id of the run to go on with, if none was given to the constructor.
            config: settings.
            plan: rows of the parameter table.
        """
        self._wandb_init.update(dir=str(folder), id=self._wandb_init["id"] or resumed_id)
        run = self.experiment
        self._id = run.id
        run.define_metric("tokens")
        self.log_hyperparams(dict(config))
        if not run.resumed and resumed_id is None:
            self._log_plan(plan)
        where = f"offline; to send it: wandb sync {Path(run.dir).parent}" if run.offline else run.url
        print(f"wandb: {where}")

    def _log_plan(self, plan: list[dict[str, Any]]) -> None:
        import wandb

        columns: list[Any] = list(plan[0])
        rows: list[Any] = [[_cell(row[name]) for name in columns] for row in plan]
        try:
            self.experiment.log({"plan": wandb.Table(columns=columns, data=rows)})
        except Exception as error:  # whatever a server answers: training does not depend on it
            print(f"warning: wandb did not take the table of the plan ({type(error).__name__})", file=sys.stderr)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None


class WandbId(Callback):
    """Keeps the id of the run in every checkpoint."""

    def __init__(self, logger: WandbRun) -> None:
        self._logger = logger

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._logger.version}


def _cell(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else str(value)


def _mode(is_offline_wanted: bool | None) -> str | None:
    """What to tell wandb; None: it reads `WANDB_MODE` itself."""
    if is_offline_wanted is not None:
        return "offline" if is_offline_wanted else "online"
    return None if os.environ.get("WANDB_MODE") else "online" if _has_key() else "offline"


def _has_key() -> bool:
    """Whether wandb would find a key without asking: in the environment, or where `wandb login` puts it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
