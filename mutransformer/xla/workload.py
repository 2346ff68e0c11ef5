"""One training step on a mesh, as far as sizes go: what `plan` reckons with before anything is traced."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from mutransformer.model.config import DecoderConfig
from mutransformer.mup.config import OptimizerConfig
from mutransformer.mup.roles import TensorSpec
from mutransformer.xla.communication import Exchange, exchanges
from mutransformer.xla.flash import check_model
from mutransformer.xla.flops import StepFlops, step_flops
from mutransformer.xla.layout import Spec, spec_of
from mutransformer.xla.mesh import MeshShape

# algorithm -> buffers of a parameter's size, of which the first is the first moment
_N_BUFFERS = {"adamw": 2, "lion": 1, "sgd": 1}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A step.

    Args:
        decoder: shape, with `remat` and `scan_layers`.
        optimizer: what it keeps of each weight.
        mesh: rows X, columns Y.
        n_sequences: in the batch of a step, on all chips together.
        n_micro_batch: parts that the batch is split into.
        compute_bytes: size of a number where the model computes.
        master_bytes: size of a number of a weight.
        shard_vocab: see `spec_of`.
        flash_attention: by a kernel that never holds the scores, or written out.
    """

    decoder: DecoderConfig
    optimizer: OptimizerConfig
    mesh: MeshShape
    n_sequences: int
    n_micro_batch: int = 1
    compute_bytes: int = 2
    master_bytes: int = 4
    shard_vocab: bool = False
    flash_attention: bool = False

    def check(self) -> None:
        """Raises ConfigError where the model or the batch cannot be cut as the mesh is, or has no such kernel."""
        if self.flash_attention:
            check_model(self.decoder)
        self.mesh.check_model(self.decoder, self.shard_vocab)
        self.mesh.check_batch(self.n_sequences, self.n_micro_batch)

    @property
    def n_tokens(self) -> int:
        """In a step, on all chips."""
        return self.n_sequences * self.decoder.sequence_len

    @property
    def positions(self) -> int:
        """Of a micro-batch, on one row of the mesh."""
        return self.n_tokens // self.n_micro_batch // self.mesh.rows

    def spec(self, tensor: TensorSpec) -> Spec:
        sizes = self.decoder.axis_sizes()
        return spec_of(tensor.axes, [sizes[axis] for axis in tensor.axes], self.mesh, self.shard_vocab)

    def n_shards(self, tensor: TensorSpec) -> int:
        """Parts that a parameter is cut into."""
        parts = {"X": self.mesh.rows, "Y": self.mesh.cols}
        return math.prod(parts[axis] for axis in self.spec(tensor) if axis)

    def count(self, tensor: TensorSpec) -> int:
        """Weights of a parameter."""
        sizes = self.decoder.axis_sizes()
        return math.prod(sizes[axis] for axis in tensor.axes)

    @property
    def on_chip(self) -> dict[str, int]:
        """Parameter -> its weights on one chip."""
        return {tensor.name: self.count(tensor) // self.n_shards(tensor) for tensor in self.decoder.tensors()}

    @property
    def parameter_bytes(self) -> int:
        """On one chip."""
        return self.master_bytes * sum(self.on_chip.values())

    @property
    def optimizer_bytes(self) -> int:
        """On one chip."""
        optimizer = self.optimizer
        n_buffers = _N_BUFFERS[optimizer.algorithm] if optimizer.algorithm != "sgd" or optimizer.momentum else 0
        is_small = optimizer.first_moment == "bfloat16" and optimizer.algorithm != "sgd"
        bytes_each = n_buffers * self.master_bytes - (self.master_bytes - 2 if is_small else 0)
        return bytes_each * sum(self.on_chip.values())

    @property
    def batch_bytes(self) -> int:
        """Token ids of the whole batch on one chip."""
        return 8 * self.n_sequences // self.mesh.rows * (self.decoder.sequence_len + 1)

    @property
    def flops(self) -> StepFlops:
        return step_flops(self.decoder, self.n_tokens, self.flash_attention)

    @property
    def exchanges(self) -> list[Exchange]:
        """What the layout sends."""
        return exchanges(
            self.decoder,
            self.mesh,
            self.n_sequences,
            self.compute_bytes,
            self.master_bytes,
            self.n_micro_batch,
            self.shard_vocab,
        )

    def with_remat(self, remat: str) -> Workload:
        return replace(self, decoder=replace(self.decoder, remat=remat))  # type: ignore[arg-type]
