"""What a checkpoint says of the settings of a command that reads it: they hold, or must be those that were given."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from jsonargparse import Namespace

from mutransformer.cli.config_files import flatten
from mutransformer.errors import ConfigError
from mutransformer.training.checkpoint import load_plain
from mutransformer.training.module import HOW_LAYERS_RUN
from mutransformer.training.run_folder import Resumed, find_checkpoint

# settings that a resumed run may change: they do not change what the weights mean, nor the tokens
FREE_TO_CHANGE = (
    "model.schedule.total_steps",
    "model.n_micro_batch",
    "model.compile",
    "model.seed",
    "data.cache",
    *(f"model.decoder.{name}" for name in HOW_LAYERS_RUN),
)


def take_settings(section: Namespace, given: AbstractSet[str], sources: Mapping[str, str], command: str) -> None:
    """Puts the model and data settings of the checkpoint `ckpt_path` in place of those that were not given.

    Args:
        section: all settings of the command; changed.
        given: dotted keys that the user set.
        sources: setting that follows another -> that other, which the user sets.
        command: `fit` has to keep to the checkpoint's data settings too.
    Raises:
        ConfigError: one was given and differs, or there is no such checkpoint.
    """
    ckpt_path = section.ckpt_path
    saved = load_plain(ckpt_path, tensors=False)["mutransformer"]["config"]
    for key, value in flatten({name: saved.get(name, {}) for name in ("model", "data")}).items():
        source = sources.get(key, key)
        if key not in section:
            continue
        if not any(f"{source}.".startswith(f"{name}.") for name in given):
            section[key] = section[source] = value
        elif section[key] != value and key not in FREE_TO_CHANGE and (key.startswith("model.") or command == "fit"):
            rule = f"checkpoint {ckpt_path} has {value!r}"
            raise ConfigError(source, section[key], rule, f"use {value!r}, or leave it out")


def resume(section: Namespace) -> Resumed | None:
    """Finds what `--resume auto` goes on from, as if ckpt_path had named it; says so if there is nothing.

    Args:
        section: all settings of `fit`; its ckpt_path is set.
    Raises:
        ConfigError: ckpt_path was given.
    """
    if section.ckpt_path:
        raise ConfigError("resume", "auto", "looks for a checkpoint, and ckpt_path gives one", "leave one of them out")
    root, dirpath = section.trainer.default_root_dir, section.checkpoint.dirpath

    def difference(saved: dict[str, Any]) -> str | None:
        compared = {name: saved.get(name, {}) for name in ("model", "data")}
        compared["trainer"] = {"precision": saved.get("trainer", {}).get("precision")}
        for key, value in flatten(compared).items():
            if key in section and section[key] != value and key not in (set(FREE_TO_CHANGE) - {"model.seed"}):
                return f"{key} is {value!r} there and {section[key]!r} here"
        return None

    found = find_checkpoint(root, dirpath, difference, lambda text: print(f"resume: {text}"))
    if found is None:
        print(f"resume: no checkpoint of this configuration in {dirpath or root}; starts anew")
        return None
    print(f"resume: goes on from {found.path}, step {found.step}")
    section.ckpt_path = found.path
    return found
