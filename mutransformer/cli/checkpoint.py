"""`mutransformer checkpoint consolidate FOLDER FILE`: a folder of shards as one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mutransformer.errors import ConfigError
from mutransformer.training.checkpoint import AtomicCheckpointIO, load_plain

USAGE = """usage: mutransformer checkpoint consolidate FOLDER FILE

Writes the checkpoint that a run on XLA left as a folder of shards into one file, with all its tensors whole. Nothing
else needs this: any command reads a folder as it is. It holds the whole checkpoint in memory.
"""


def run(args: Sequence[str]) -> None:
    """Runs the command.

    Args:
        args: what follows `checkpoint`.
    Raises:
        ConfigError: the arguments are not these, the folder holds no checkpoint, or the file is there already.
        SaveError: the file could not be written.
    """
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return
    if args[0] != "consolidate" or len(args) != 3 or any(arg.startswith("-") for arg in args):
        rule = "is not `consolidate FOLDER FILE`"
        raise ConfigError("checkpoint", " ".join(args), rule, "see `mutransformer checkpoint --help`")
    folder, file = args[1:]
    if Path(file).exists():
        raise ConfigError("FILE", file, "is there already", "give a new name")
    checkpoint = load_plain(folder)
    AtomicCheckpointIO().save_checkpoint(checkpoint, file)
    n_bytes = Path(file).stat().st_size
    print(f"{file}: step {checkpoint['global_step']}, {n_bytes:,} bytes")
