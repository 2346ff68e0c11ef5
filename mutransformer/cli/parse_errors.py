"""From jsonargparse's messages, several lines long and in its own terms, to one line that a user can act on."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from mutransformer.errors import ConfigError

_HELP = "see `mutransformer COMMAND --help`"
_UNKNOWN_KEY = (
    re.compile(r"unrecognized arguments: (.+)", re.IGNORECASE),
    re.compile(r"does not accept option '([^']+)'"),
    re.compile(r"Key '?\"?([\w.]+)'?\"? is not expected"),
)
_NESTED = re.compile(r"NestedArg\(key='([^']+)', val=(.+?)\)")
_BAD_VALUE = re.compile(r"(?:Parser key|Problem with given class_path|key) \"([\w.]+)\":\s*(.*)", re.DOTALL)
_LINKED = re.compile(r"Linked \"([\w.]+)\" must be given via \"([\w.]+)\"")


def from_message(message: str, known_keys: Iterable[str]) -> ConfigError:
    """The ConfigError for a parser's message.

    Args:
        message: what jsonargparse says.
        known_keys: dotted names of all settings, for the nearest one to a key that is not known.
    """
    if match := _LINKED.search(message):
        return ConfigError(match[1], ..., "is linked and never typed twice", f"set {match[2]}")
    for pattern in _UNKNOWN_KEY:
        if match := pattern.search(message):
            key, _, value = match[1].split(" --")[0].strip().lstrip("-").partition("=")
            near = difflib.get_close_matches(key, list(known_keys), n=1, cutoff=0.5)
            remedy = f"did you mean {near[0]}?" if near else _HELP
            return ConfigError(key, value or ..., "is not a known setting", remedy)
    if match := _BAD_VALUE.search(message):
        return _bad_value(match[1], match[2])
    return ConfigError("command line", ..., _one_line(message), _HELP)


def _bad_value(key: str, reason: str) -> ConfigError:
    if nested := _NESTED.search(reason):  # an argument of a class, which has none of this name
        return ConfigError(f"{key}.{nested[1]}", nested[2].strip("'"), "is not a known setting", _HELP)
    value = re.search(r"(?:Got value|Given value): (.*)", reason)
    given = value[1].strip() if value else ...
    if choices := re.search(r"Literal\[(.*?)\]", reason):
        return ConfigError(key, given, "is not one of the choices", f"use one of {choices[1]}")
    types = [t for t in dict.fromkeys(re.findall(r"Expected a <class '(\w+)'>", reason)) if t != "NoneType"]
    if types:
        return ConfigError(key, given, f"is not of type {' or '.join(types)}", f"give a value of type {types[-1]}")
    return ConfigError(key, given, _one_line(reason), _HELP)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
