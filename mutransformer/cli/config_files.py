"""What the command line says before it is parsed: which files, in which order, and which keys the user set.

Files go before everything else and a file's `base:` before it, so that the command line wins over a later file, that
over an earlier one, and those over their bases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from mutransformer.errors import ConfigError

_OPTIONS = ("-c", "--config")
_SECTIONS = ("trainer", "model", "data", "checkpoint")


def in_order_of_precedence(args: Sequence[str]) -> list[str]:
    """Rearranges a command line: bases, then `--config` files as given, then the rest as given.

    Raises:
        ConfigError: a file that does not exist or is not a YAML mapping; bases that go in a circle.
    """
    files, rest = _split(args)
    return [*(part for file in _with_bases(files) for part in ("--config", file)), *rest]


def given_keys(args: Sequence[str]) -> set[str]:
    """The dotted keys that were set, on the command line or in files; all others have their defaults."""
    files, rest = _split(args)
    typed = {arg.partition("=")[0].removeprefix("--") for arg in rest if arg.startswith("--")}
    return typed.union(*(flatten(_read(Path(file))) for file in _with_bases(files)))


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping -> dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """(config files, other arguments)."""
    files, rest, left = [], [], list(args)
    while left:
        arg = left.pop(0)
        name, _, value = arg.partition("=")
        if name not in _OPTIONS:
            rest.append(arg)
        elif value or left:
            files.append(value or left.pop(0))
        else:
            raise ConfigError("--config", ..., "names no file", "give the path of a YAML file")
    return files, rest


def _with_bases(files: Sequence[str]) -> list[str]:
    """The files with what they are laid over before them all."""
    return [*dict.fromkeys(base for file in files for base in _bases(Path(file), ())), *files]


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text())
    except OSError as error:
        raise ConfigError("--config", str(file), f"cannot be read ({error.strerror})", "see configs/") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("--config", str(file), f"is not YAML ({reason})", "see configs/base.yaml") from error
    if not isinstance(tree, dict):
        raise ConfigError("--config", str(file), "is not a YAML mapping", "see configs/base.yaml")
    for section in _SECTIONS:
        if not isinstance(tree.get(section, {}), dict):
            raise ConfigError("--config", str(file), f"its {section} is not a mapping", "see configs/base.yaml")
    return tree


def _bases(file: Path, above: Iterable[Path]) -> list[str]:
    """The files that `file` is laid over, the lowest first."""
    base = _read(file).get("base")
    if base is None:
        return []
    path = file.parent / str(base)
    if path in (chain := (*above, file)):
        raise ConfigError("base", str(base), f"goes in a circle from {file}", "leave one of them out")
    return [*_bases(path, chain), str(path)]
