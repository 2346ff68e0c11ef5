"""Tensors on the mesh: the marks that cut them by the table, reading back that they took, and their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs

from mutransformer.model.axes import Axes
from mutransformer.xla import runtime
from mutransformer.xla.layout import Spec, spec_of
from mutransformer.xla.mesh import MeshShape
from mutransformer.xla.shards import HostShards


class ShardingError(RuntimeError):
    """A tensor is not sharded as the table says; the message names it."""


@dataclass(frozen=True)
class Sharding:
    """A mesh, its table, and the marks.

    Args:
        shape: rows and columns.
        shard_vocab: see `spec_of`.
        marked: specs of all marks so far.
    """

    shape: MeshShape
    shard_vocab: bool = False
    marked: set[Spec] = field(default_factory=set, compare=False)

    @cached_property
    def mesh(self) -> xs.Mesh:
        return xs.Mesh(np.arange(self.shape.n_devices), (self.shape.rows, self.shape.cols), ("X", "Y"))

    def spec(self, tensor: torch.Tensor, axes: Axes) -> Spec:
        return spec_of(axes, tensor.shape, self.shape, self.shard_vocab)

    def shard(self, tensor: torch.Tensor, spec: Spec) -> None:
        """Cuts a tensor that is on the device, in place."""
        torch_xla._XLAC._xla_mark_sharding(tensor, self.mesh.get_op_sharding(spec))

    def mark(self, tensor: torch.Tensor, axes: Axes) -> torch.Tensor:
        """The tensor with a mark for the partitioner, also on its gradient; for `model.axes.marking`."""
        if tensor.device.type != "xla":
            return tensor
        spec = self.spec(tensor, axes)
        self.marked.add(spec)
        if isinstance(tensor, torch.nn.Parameter):
            tensor = tensor * 1  # a clone would be cut in the same place as the parameter; XLA leaves the product out
        return _mark(tensor, "".join(to or "N" for to in spec))

    def check_marks(self, graph: str) -> None:
        """Raises ShardingError where a mark that was put on an activation or a weight is not in the graph.

        Args:
            graph: HLO text of the step, before the partitioner.
        """
        for spec in self.marked if self.shape.n_devices > 1 else ():
            probe = torch.zeros([self._parts[to] for to in spec]).to(runtime.device()) * 1
            self.shard(probe, spec)
            written = torch_xla._XLAC._get_xla_sharding_spec(probe)
            if f'custom_call_target="Sharding", sharding={written}' not in graph:
                raise ShardingError(f"a tensor marked {spec} has no such mark in the graph of the step")

    @property
    def _parts(self) -> dict[str | None, int]:
        return {"X": self.shape.rows, "Y": self.shape.cols, None: 1}

    def check(self, name: str, tensor: torch.Tensor, spec: Spec) -> None:
        """Raises ShardingError where the buffers are not cut as `spec` says; reads where they lie, not their values."""
        sizes = [size // self._parts[to] for size, to in zip(tensor.shape, spec, strict=True)]
        found = places(tensor)
        if self.shape.n_hosts == 1 and len(found) == self.shape.n_devices:
            axes = [{"X": i // self.shape.cols, "Y": i % self.shape.cols, None: 0} for i in range(len(found))]
            wanted = [
                tuple(slice(at[to] * size, (at[to] + 1) * size) for to, size in zip(spec, sizes, strict=True))
                for at in axes
            ]
        else:  # which devices are this host's is not known here: sizes alone
            wanted = [tuple(slice(0, size) for size in sizes)] * len(found)
            found = [tuple(slice(0, part.stop - part.start) for part in place) for place in found]
        if found != wanted:
            held = [part.stop - part.start for part in found[0]]
            where = "" if held != sizes else " elsewhere"
            raise ShardingError(f"{name}: a device holds {held} of {list(tensor.shape)}, the table says {sizes}{where}")


def places(tensor: torch.Tensor) -> list[tuple[slice, ...]]:
    """Where in the whole the shard of each of this host's devices lies."""
    whole = tuple(slice(0, size) for size in tensor.shape)
    if torch_xla._XLAC._get_xla_sharding_type(tensor) is None or tensor.dim() == 0:
        return [whole]
    found = torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])[0]
    return [whole if where is Ellipsis else tuple(slice(p.start, p.stop) for p in where) for _, where in found]


def local_shards(tensor: torch.Tensor) -> list[tuple[torch.Tensor, tuple[slice, ...]]]:
    """This host's shards, copied to its memory: (data, where it lies in the whole), one for each device."""
    whole = tuple(slice(0, size) for size in tensor.shape)
    if torch_xla._XLAC._get_xla_sharding_type(tensor) is None or tensor.dim() == 0:
        return [(tensor.cpu(), whole)]
    shards = []
    for shard in xs.XLAShardedTensor(tensor).local_shards:
        where = whole if shard.indices is Ellipsis else tuple(shard.indices)
        shards.append((shard.data[tuple(slice(0, part.stop - part.start) for part in where)], where))
    return shards


def fetch(tensor: torch.Tensor) -> HostShards:
    """This host's parts of a tensor on the device."""
    return HostShards.of(tensor, local_shards(tensor))


def empty_parts(tensor: torch.Tensor) -> HostShards:
    """Room in this host's memory for its parts of a tensor on the device."""
    parts = [(torch.empty([p.stop - p.start for p in place], dtype=tensor.dtype), place) for place in places(tensor)]
    return HostShards.of(tensor, parts)


@torch.no_grad()
def fill(tensor: torch.Tensor, values: HostShards) -> None:
    """Puts this host's parts into a tensor on the device, whose sharding stays as it is."""
    sharded = xs.XLAShardedTensor(tensor)
    if sharded.sharding_type in (None, xs.ShardingType.REPLICATED):
        tensor.copy_(values.parts[(0,) * tensor.dim()])
        return
    shards = sharded.local_shards
    for shard in shards:
        part = values.parts[tuple(piece.start for piece in shard.indices)]
        shard.data[tuple(slice(0, size) for size in part.shape)] = part
    torch_xla._XLAC._load_local_shards(
        tensor, [shard.data for shard in shards], [shard.shard_device for shard in shards]
    )


_active: Sharding | None = None


def activate(sharding: Sharding | None) -> None:
    """Sets the mesh that `mark` is for; None: none."""
    global _active
    _active = sharding


@torch.library.custom_op("mutransformer::mark", mutates_args=())
def _mark(x: torch.Tensor, spec: str) -> torch.Tensor:
    # an operator of its own, so that it lives through AOTAutograd's tracing of the scanned layer
    out = x.clone()
    if _active is not None:
        _active.shard(out, tuple(None if to == "N" else to for to in spec))
    return out


@_mark.register_fake
def _(x: torch.Tensor, spec: str) -> torch.Tensor:
    return torch.empty_like(x)


def _remember(ctx, inputs, output) -> None:
    ctx.spec = inputs[1]


def _mark_gradient(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return _mark(gradient, ctx.spec), None


_mark.register_autograd(_mark_gradient, setup_context=_remember)

# the operator, as a traced graph names it
MARK = torch.ops.mutransformer.mark.default


def specs_of_state(parameter: torch.Tensor, spec: Spec, state: Mapping[str, object]) -> dict[str, Spec]:
    """Buffers of an optimizer's state that have the parameter's shape -> its spec; others are whole."""
    return {
        name: spec if value.shape == parameter.shape else (None,) * value.dim()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.device.type == "xla"
    }
