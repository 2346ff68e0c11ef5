"""A run's settings as one nested mapping of plain values, changed by dotted keys and made into objects.

The mapping is what the command line parsed: `seed_everything`, `model`, `data`, `trainer`. Read by the checks, in this
process and in workers.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint

from mutransformer.data.datamodule import TextDataModule
from mutransformer.errors import ConfigError
from mutransformer.mup.config import ParametrizationConfig
from mutransformer.training.checkpoint import AtomicCheckpointIO
from mutransformer.training.engine import engine_options
from mutransformer.training.module import LINKED_SETTINGS, NOT_FOR_TRAINER, DecoderModule

Settings = Mapping[str, Any]
Changes = Mapping[str, Any]

WIDTH = "model.decoder.d_model"
DEPTH = "model.decoder.n_layer"
LEARNING_RATE = "model.optimizer.learning_rate"
SEED = "seed_everything"

# settings of the Trainer that a study has no use for, or its own: many short runs, no files of theirs
_STUDY_TRAINER = {
    "logger": False,
    "profiler": None,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "fast_dev_run": False,
    "max_time": None,
    "max_epochs": None,
}


def changed(settings: Settings, changes: Changes) -> dict[str, Any]:
    """The settings with values put at dotted keys and at those that are linked to them.

    A seed counts for the initialization and for the order of the data.

    Raises:
        KeyError: a key that is not there.
    """
    result = copy.deepcopy(dict(settings))
    for key, value in changes.items():
        linked = (LINKED_SETTINGS[key],) if key in LINKED_SETTINGS else ()
        for target in (key, *linked, *(("data.shuffle_seed",) if key == SEED else ())):
            *path, last = target.split(".")
            tree = result
            for part in path:
                tree = tree[part]
            if last not in tree:
                raise KeyError(key)
            tree[last] = value
    return result


def check_seeds(seeds: Sequence[int]) -> None:
    """Raises ConfigError for seeds that are missing, repeated, or not seeds."""
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**32 for seed in seeds):
        raise ConfigError(
            "seeds", list(seeds), "must be one or more numbers from 0 to 2^32 - 1, each once", "use 1,2,3"
        )


def value_at(settings: Settings, key: str) -> Any:
    """The value at a dotted key."""
    for part in key.split("."):
        settings = settings[part]
    return settings


def standard(settings: Settings) -> dict[str, Any]:
    """The same run in the standard parametrization: no multiplier, attention scores over sqrt(d_head)."""
    kept = {name: settings["model"]["parametrization"][name] for name in ("d_base", "n_base_layer")}
    plain = dataclasses.asdict(ParametrizationConfig(rules="sp", **kept))
    return changed(settings, {"model.parametrization": plain})


def build_data(settings: Settings) -> TextDataModule:
    """The data module of a run."""
    return TextDataModule(**settings["data"])


def build_module(settings: Settings, vocab_size: int, **changes: Any) -> DecoderModule:
    """The module of a run; weights are not made yet.

    Raises:
        ConfigError: values that cannot work together.
    """
    model = settings["model"]
    decoder = {**model["decoder"], "vocab_size": vocab_size}
    return DecoderModule(**{**model, "decoder": decoder, **changes})


def build_trainer(settings: Settings, callbacks: Sequence[Callback]) -> Trainer:
    """A Trainer for one run of a study: the user's engine and precision, no files, no words."""
    own = {
        **_STUDY_TRAINER,
        "callbacks": list(callbacks),
        "plugins": [AtomicCheckpointIO()],
        "enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks),
    }
    if (devices := settings["trainer"]["devices"]) not in ("auto", 1, "1"):
        # several would be one run of several processes, each of which would be the whole study
        raise ConfigError("trainer.devices", devices, "a run of a study has one", "use 1, with --jobs or --shard")
    own["devices"] = 1
    engine = {name: value for name, value in settings["trainer"].items() if name not in NOT_FOR_TRAINER}
    engine.update(engine_options(engine["accelerator"], engine["strategy"]))
    with quiet():
        return Trainer(**{**engine, **own})


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps Lightning's words about each of many short runs from the terminal."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
