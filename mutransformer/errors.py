"""Errors that a user can mend, and the exit codes they end with. Read by every room; imports none."""

from __future__ import annotations

import math

EXIT_USER_ERROR = 2
EXIT_FAILURE = 1


class ConfigError(ValueError):
    """A setting that cannot work: one line with the field, its value, the rule and what would do.

    Args:
        field: dotted name as the user types it, e.g. `model.decoder.d_model`.
        value: the value that was given; `...` where it is not known, it is then left out.
        rule: what must hold, e.g. "must be a multiple of d_head=64".
        remedy: a value or action that would do, e.g. "use 128 or 192".
    """

    def __init__(self, field: str, value: object, rule: str, remedy: str) -> None:
        shown = field if value is ... else f"{field}={value!r}"
        super().__init__(f"{shown}: {rule}; {remedy}")
        self.field = field


class NonFiniteError(RuntimeError):
    """A loss or gradient norm is NaN or infinite; the message names the step and the last good checkpoint."""


class SaveError(RuntimeError):
    """A file could not be written whole (full disk, quota, permissions); what was there before is intact."""


class DataError(RuntimeError):
    """Text could not be read to its end, or cached tokens are damaged; the message says what is kept and what to do."""


class CheckFailed(RuntimeError):
    """A check came to FAIL, or could not be completed; the message says which, what was printed before it why."""


class Interrupted(BaseException):
    """A signal asked the command to stop; the message says what was saved and how to go on.

    Not an Exception, so that no code on the way takes it for an error of its own.

    Args:
        signum: the signal.
        message: for the user.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum


def require_finite(section: str, config: object) -> None:
    """Raises ConfigError for the first float among the attributes of `config` that is NaN or infinite."""
    for name, value in vars(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{section}.{name}", value, "must be finite", "give a number")


def require_positive(section: str, **values: float | None) -> None:
    """Raises ConfigError for the first of `values` that is given (not None) and not above zero.

    Args:
        section: dotted prefix of the fields, e.g. `model.decoder`.
        values: field name -> value.
    """
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ConfigError(f"{section}.{name}", value, "must be above zero", "give a positive number")
