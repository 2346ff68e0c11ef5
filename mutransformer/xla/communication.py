"""What the layout has to send in a training step, by arithmetic: what a compiled program is held against.

Weights are gathered over X where a layer uses them, once forward and once backward; their gradients are scattered back,
once. The residual stream, cut over Y, is gathered before each projection and the sum of a projection's parts scattered
after it. Norm statistics and other small sums are left out. A compiler may send less, where it keeps what was gathered,
or more, where it computes again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mutransformer.model.config import DecoderConfig
from mutransformer.mup.roles import TensorSpec
from mutransformer.xla.collectives import Key, Sent, wire_bytes
from mutransformer.xla.layout import spec_of
from mutransformer.xla.mesh import MeshShape


@dataclass(frozen=True)
class Exchange:
    """A collective that the layout asks for.

    Args:
        what: tensor and why.
        kind: as in `collectives.KINDS`.
        axis: `X` or `Y`.
        n_devices: in a group.
        count: in a step.
        result_bytes: of one, on a device.
    """

    what: str
    kind: str
    axis: str
    n_devices: int
    count: int
    result_bytes: int

    @property
    def sent(self) -> Sent:
        one = Sent(1, self.result_bytes, wire_bytes(self.kind, self.result_bytes, self.n_devices))
        return one.times(self.count)


def exchanges(
    config: DecoderConfig,
    mesh: MeshShape,
    n_sequences: int,
    compute_bytes: int = 4,
    master_bytes: int = 4,
    n_micro_batch: int = 1,
    shard_vocab: bool = False,
) -> list[Exchange]:
    """All that "2D finalized" sends in one optimizer step.

    Args:
        config: the decoder.
        mesh: rows X, columns Y.
        n_sequences: in the batch of a step, on all devices together.
        compute_bytes: size of a number where the model computes.
        master_bytes: size of a number of a weight.
        n_micro_batch: parts that the batch is split into; each gathers the weights and scatters gradients anew.
        shard_vocab: see `spec_of`.
    """
    parts = {"X": mesh.rows, "Y": mesh.cols}
    sizes = config.axis_sizes()

    def on_device(spec: TensorSpec, without: str) -> int:
        """Elements of a layer's slice on a device once it is whole over one axis."""
        shape = [sizes[axis] for axis in spec.axes]
        to = spec_of(spec.axes, shape, mesh, shard_vocab)
        kept = [
            size // (parts[axis] if axis and axis != without else 1)
            for name, size, axis in zip(spec.axes, shape, to, strict=True)
            if name != "layers"
        ]
        return math.prod(kept)

    tensors = {spec.name: spec for spec in config.tensors()}
    cut_over_x = {
        name: "X" in spec_of(spec.axes, [sizes[axis] for axis in spec.axes], mesh, shard_vocab)
        for name, spec in tensors.items()
    }
    found: list[Exchange] = []

    def add(what: str, kind: str, axis: str, count: int, elements: int, n_bytes: int = compute_bytes) -> None:
        if parts[axis] > 1 and count:
            found.append(Exchange(what, kind, axis, parts[axis], count, elements * n_bytes))

    matrices = [spec for spec in tensors.values() if spec.is_in_block and spec.name.startswith("w_")]
    for spec in matrices:
        times = config.n_layer * n_micro_batch
        whole = on_device(spec, without="X")
        if cut_over_x[spec.name]:
            add(f"{spec.name}", "all-gather", "X", 2 * times, whole)
            add(f"gradient of {spec.name}", "reduce-scatter", "X", times, whole // mesh.rows)
        else:
            add(f"gradient of {spec.name}", "all-reduce", "X", times, whole)
    for name, n_bytes in (("embedding", master_bytes), ("unembedding", compute_bytes)):
        if name not in tensors:
            continue
        whole = on_device(tensors[name], without="X")
        if cut_over_x[name]:
            add(name, "all-gather", "X", 2 * n_micro_batch, whole, n_bytes)
            add(f"gradient of {name}", "reduce-scatter", "X", n_micro_batch, whole // mesh.rows, n_bytes)
        else:
            add(f"gradient of {name}", "all-reduce", "X", n_micro_batch, whole, n_bytes)

    positions = n_sequences // n_micro_batch // mesh.rows * config.sequence_len
    stream = positions * config.d_model
    n_in = sum(spec.axes[-1] == "embed" for spec in matrices)  # projections that read the stream
    n_out = len(matrices) - n_in
    layers = config.n_layer * n_micro_batch
    # forward and again for the gradients of weights, and the gradient of what is written into the stream
    add("residual stream", "all-gather", "Y", (2 + 2 + n_out) * layers, stream)
    add("residual stream", "reduce-scatter", "Y", (n_out + n_in) * layers, stream // mesh.cols)
    add("logits", "all-reduce", "Y", n_micro_batch, positions * config.vocab_size)
    return found


def expected(found: Iterable[Exchange]) -> dict[Key, Sent]:
    """(kind, mesh axis) -> what is sent in a step, as `collectives` counts it."""
    total: dict[Key, Sent] = {}
    for one in found:
        total[one.kind, one.axis] = total.get((one.kind, one.axis), Sent()) + one.sent
    return dict(sorted(total.items()))
