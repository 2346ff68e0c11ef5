"""The command `mutransformer`: finds the subcommand, runs it, and turns a user's mistake into one line.

Nothing heavy is imported before a subcommand is known: `mutransformer --help` answers at once.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from mutransformer import __version__
from mutransformer.errors import (
    EXIT_FAILURE,
    EXIT_USER_ERROR,
    CheckFailed,
    ConfigError,
    DataError,
    Interrupted,
    NonFiniteError,
    SaveError,
)

_REPORTED = (CheckFailed, ConfigError, DataError, NonFiniteError, SaveError, OSError, Interrupted, KeyboardInterrupt)

COMMANDS = {
    "fit": "train a model: data, muP decoder, run folder with checkpoint and metrics",
    "validate": "validation loss, perplexity and bits a byte of a checkpoint (--ckpt_path)",
    "test": "the same on the test split",
    "sample": "go on with prompts, token by token (--ckpt_path, --prompt)",
    "export": "write a checkpoint as a folder that transformers loads, or as plain safetensors (--ckpt_path, --out)",
    "bench": "time the training step: tokens/s, MFU, compilations, memory",
    "coordcheck": "train a few steps at several widths: does every tensor keep its size? PASS or FAIL, SP must fail",
    "transfer": "sweep learning rate and width: does the best learning rate stay? PASS or FAIL, SP must fail",
    "prepare": "fill the token cache of a config without training",
    "data": "list the token caches, and which of them a config would use (--verify compares hashes)",
    "plan": "experimental: does a run fit a TPU slice that is not there? FITS or DOES NOT FIT, with a step's estimate",
    "checkpoint": "consolidate FOLDER FILE: write a folder of shards, as a run on XLA leaves it, as one file",
    "describe": "print the parameter plan: role, init, learning rate and decay of every tensor; makes no weights",
}

USAGE = """usage: mutransformer COMMAND [--config FILE ...] [--SECTION.KEY=VALUE ...]

Pre-train transformer decoders in maximal update parametrization (muP).

commands:
{commands}

Several --config files may be given: a later one wins over an earlier one, the command line over all.
  mutransformer fit --config configs/small.yaml --model.decoder.d_model=256
  mutransformer COMMAND --help             every setting of a command
  mutransformer COMMAND --print_config     the settings as YAML
  MUTRANSFORMER_DEBUG=1 mutransformer ...  a traceback with every error
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments after the program's name; None: those of the process.
    Returns:
        0 done; 1 a check came to FAIL, training met a loss that is not finite, or the disk or the network a failure;
        2 a user's mistake; 130 and 143 stopped by SIGINT and SIGTERM with the state saved.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if args in ([], ["-h"], ["--help"]):
        print(USAGE.format(commands="\n".join(f"  {name:<11}{text}" for name, text in COMMANDS.items())))
        return 0
    if args == ["--version"]:
        print(__version__)
        return 0
    try:
        _run(args)
    except BrokenPipeError:  # whoever read our output has left, as in `describe | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except _REPORTED as error:
        if os.environ.get("MUTRANSFORMER_DEBUG") == "1":
            raise
        return _report(error)
    return 0


def _report(error: BaseException) -> int:
    """Says what happened in a line or two; returns the exit code."""
    if isinstance(error, Interrupted):
        print(f"\n{signal.Signals(error.signum).name}: {error}")
        return 128 + error.signum
    if isinstance(error, KeyboardInterrupt):
        print("\nSIGINT: stopped before the first step; nothing to resume", file=sys.stderr)
        return 128 + signal.SIGINT
    print(f"mutransformer: {error}", file=sys.stderr)
    return EXIT_USER_ERROR if isinstance(error, ConfigError) else EXIT_FAILURE


def _run(args: list[str]) -> None:
    command, rest = args[0], args[1:]
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
        raise ConfigError("command", command, "is not known", remedy)
    os.environ.setdefault("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    os.environ.setdefault(
        "TF_CPP_MIN_LOG_LEVEL", "2"
    )  # torch loads torch_xla where it is installed; its notices are no news
    if not sys.warnoptions:
        warnings.filterwarnings("ignore", module="lightning")
    if command == "checkpoint":
        from mutransformer.cli.checkpoint import run

        run(rest)
        return
    from mutransformer.cli.run import RunCLI

    RunCLI(command, rest)
