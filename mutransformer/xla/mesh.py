"""The mesh of devices, X by Y, and what a model and a batch must be divisible by to lie on it. Arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass

from mutransformer.errors import ConfigError
from mutransformer.model.config import DecoderConfig

REST = -1


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Devices in rows (axis X: batches, and weights over d_model) and columns (axis Y: heads, features).

    Args:
        rows: X.
        cols: Y.
        n_hosts: processes, each with as many devices.
    """

    rows: int
    cols: int
    n_hosts: int = 1

    @property
    def n_devices(self) -> int:
        return self.rows * self.cols

    @property
    def unit(self) -> int:
        """What the sequences of a batch must be a multiple of: hosts cut theirs over all devices first."""
        return self.n_devices if self.n_hosts > 1 else self.rows

    @classmethod
    def of(cls, rows: int, cols: int, n_devices: int, n_hosts: int = 1) -> MeshShape:
        """Fills in the one that is -1 and compares with the devices there are.

        Raises:
            ConfigError: rows times cols is not the number of devices.
        """
        for name, size in (("mesh_rows", rows), ("mesh_cols", cols)):
            if size != REST and size < 1:
                raise ConfigError(
                    f"trainer.strategy.{name}", size, "must be a number of devices", "use -1 for the rest"
                )
        if rows == REST and cols == REST:
            rows, cols = n_devices, 1
        elif rows == REST or cols == REST:
            name, given = ("mesh_cols", cols) if rows == REST else ("mesh_rows", rows)
            if n_devices % given:
                divisors = ", ".join(str(d) for d in range(1, n_devices + 1) if n_devices % d == 0)
                rule = f"does not divide the {n_devices} devices"
                raise ConfigError(f"trainer.strategy.{name}", given, rule, f"use one of {divisors}")
            rows, cols = (n_devices // cols, cols) if rows == REST else (rows, n_devices // rows)
        if rows * cols != n_devices:
            rule = f"times mesh_cols {cols} is {rows * cols}, and there are {n_devices} devices"
            raise ConfigError("trainer.strategy.mesh_rows", rows, rule, "use -1 for one of the two")
        return cls(rows=rows, cols=cols, n_hosts=n_hosts)

    def check_model(self, config: DecoderConfig, shard_vocab: bool = False) -> None:
        """Raises ConfigError where a width cannot be cut into as many parts as its mesh axis has devices."""
        wanted = [
            ("d_model", config.d_model, "mesh_rows", self.rows),
            ("d_model", config.d_model, "mesh_cols", self.cols),
            ("n_head (d_model / d_head)", config.n_head, "mesh_cols", self.cols),
            ("d_ff (ff_multiple * d_model)", config.d_ff, "mesh_cols", self.cols),
        ]
        if shard_vocab:
            wanted.append(("vocab_size", config.vocab_size, "mesh_rows", self.rows))
        for name, size, axis, n_parts in wanted:
            if size % n_parts:
                rule = f"does not divide {name} = {size}"
                raise ConfigError(
                    f"trainer.strategy.{axis}", n_parts, rule, f"use {_best_divisor(size, n_parts)}, or another width"
                )

    def check_batch(self, n_rows: int, n_parts: int = 1) -> None:
        """Raises ConfigError where a batch cannot be cut over the rows of the mesh and over the hosts.

        Args:
            n_rows: sequences in the batch of all hosts.
            n_parts: micro-batches that it is split into.
        """
        unit = self.unit
        why = f"{self.n_hosts} hosts with {self.n_devices} devices" if self.n_hosts > 1 else f"mesh_rows {self.rows}"
        if n_rows % (unit * n_parts):
            parts = f" in {n_parts} micro-batches" if n_parts > 1 else ""
            raise ConfigError(
                "data.tokens_per_batch",
                f"{n_rows} sequences{parts}",
                f"is not a multiple of {unit * n_parts} ({why})",
                f"use {-(-n_rows // (unit * n_parts)) * unit * n_parts} sequences, or another mesh",
            )


def _best_divisor(size: int, limit: int) -> int:
    return next(d for d in range(min(size, limit), 0, -1) if size % d == 0)
