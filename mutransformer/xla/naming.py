"""What an array in a compiled program is, told by its sizes: compilers name by operators, people by layers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mutransformer.model.axes import Axes
from mutransformer.xla.hlo import Shape
from mutransformer.xla.layout import spec_of
from mutransformer.xla.workload import Workload

# axes of an activation -> what it is
ACTIVATION_NAMES: dict[Axes, str] = {
    ("batch", "length", "vocab"): "logits",
    ("batch", "heads", "length", "keys"): "attention scores",
    ("batch", "length", "mlp"): "feed-forward hidden",
    ("batch", "heads", "length", "head_dim"): "attention heads",
    ("batch", "kv_heads", "length", "head_dim"): "attention keys or values",
    ("batch", "length", "embed"): "residual stream",
}

Sizes = tuple[int, ...]


class Names:
    """Names of arrays by their sizes on one chip.

    Args:
        workload: the step that was compiled.
    """

    def __init__(self, workload: Workload) -> None:
        self._by_sizes: dict[Sizes, str] = {}
        self._by_count: dict[int, str] = {}
        for name, sizes, is_activation in _known(workload):
            self._by_sizes.setdefault(_key(sizes), name)
            if is_activation:  # dimensions are merged and split; of weights too many have one size
                self._by_count.setdefault(math.prod(sizes), name)

    def of(self, shape: Shape) -> str:
        """The name; empty where nothing known has these sizes, in any order, or as many elements."""
        return self._by_sizes.get(_key(shape.sizes)) or self._by_count.get(math.prod(shape.sizes), "")


def _key(sizes: Sizes) -> Sizes:
    return tuple(sorted(size for size in sizes if size != 1))


def _known(workload: Workload) -> Iterator[tuple[str, Sizes, bool]]:
    """All that is expected in a step, the likelier first."""
    decoder, mesh = workload.decoder, workload.mesh
    parts = {"X": mesh.rows, "Y": mesh.cols}
    sizes = {
        **decoder.axis_sizes(),
        "batch": workload.n_sequences // workload.n_micro_batch,
        "length": decoder.sequence_len,
        "keys": decoder.sequence_len,
    }

    def cut(axes: Axes, whole_over: str = "") -> Sizes:
        spec = spec_of(axes, [sizes[axis] for axis in axes], mesh, workload.shard_vocab)
        return tuple(
            sizes[axis] // (parts[to] if to and to not in whole_over else 1)
            for axis, to in zip(axes, spec, strict=True)
        )

    activations = [(name, axes) for axes, name in ACTIVATION_NAMES.items()]
    for name, axes in activations:
        yield name, cut(axes), True
        yield f"{name}, gathered over Y", cut(axes, whole_over="Y"), True
    for name, axes in activations[1:]:  # logits are made once
        yield f"{name} of all layers, kept for the backward pass", (decoder.n_layer, *cut(axes)), True
    for tensor in decoder.tensors():
        yield f"{tensor.name} or its gradient", cut(tensor.axes), False
        if tensor.is_in_block:
            yield f"{tensor.name} of one layer, gathered", cut(tensor.axes, whole_over="X")[1:], False
            yield f"{tensor.name} of one layer", cut(tensor.axes)[1:], False
        yield f"{tensor.name}, gathered", cut(tensor.axes, whole_over="X"), False
    for name, axes in activations[1:]:
        yield f"{name} of all layers, gathered over X and Y", (decoder.n_layer, *cut(axes, whole_over="XY")), True
        yield f"{name}, gathered over X and Y", cut(axes, whole_over="XY"), True
