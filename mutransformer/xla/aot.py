"""A training step as a program, from tensors without memory, for devices that are not there.

torch_xla traces on a CPU client with one device that is told to be many, and lowers as for a TPU. What comes out is HLO
with the name and sharding of each argument and result; `compile_slice.py` compiles it in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr
from torch_xla.core.xla_builder import create_placeholder_tensor

from mutransformer.xla import runtime
from mutransformer.xla.layout import Spec
from mutransformer.xla.mesh import MeshShape
from mutransformer.xla.sharding import Sharding

REPLICATED = "{replicated}"


@dataclass(frozen=True)
class Argument:
    """A parameter of the program.

    Args:
        name: empty for what is sent along with a step, such as its learning rates.
        shape: whole.
        dtype: torch's name of it.
        sharding: in HLO's notation.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sharding: str


@dataclass(frozen=True)
class Lowered:
    """A program before it is partitioned and compiled.

    Args:
        hlo: serialized module.
        arguments: in order.
        results: names in order; one that is an argument's name too is updated in place.
        mesh: that the shardings are for.
    """

    hlo: bytes
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    mesh: MeshShape


@dataclass
class AbstractDevices:
    """Devices of which there is only the number, and the tensors that were made for them.

    Args:
        sharding: mesh and table; as many devices as the mesh has are feigned from here on in this process.
    """

    sharding: Sharding
    _named: dict[int, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n_devices = self.sharding.shape.n_devices
        if not xr.is_spmd():
            os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1")
        runtime.start()
        # torch_xla asks these wherever it makes a mesh, and chooses what it lowers to
        xr.global_runtime_device_count = lambda: n_devices
        os.environ["PJRT_DEVICE"] = "TPU"

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype, spec: Spec) -> torch.Tensor:
        """A tensor on these devices, of this shape and cut by `spec`, that holds nothing."""
        tensor = create_placeholder_tensor(tuple(shape), dtype)
        self._named[_handle(tensor)] = (name, sharding_text(spec, self.sharding.shape))  # it changes with the mark
        if any(spec):
            torch_xla._XLAC._xla_annotate_custom_sharding(tensor, self.sharding.mesh.get_op_sharding(spec))
        return tensor

    def lower(self, results: Iterable[tuple[str, torch.Tensor]]) -> Lowered:
        """The program that computes the results from the tensors made here.

        Args:
            results: name -> tensor; under a name of `tensor`, that tensor's new value.
        """
        names, tensors = zip(*results, strict=True)
        context = torch_xla._XLAC.lowering.LoweringContext("train_step")
        context.build([tensor.detach() for tensor in tensors])
        by_index = context.device_parameter_id_tensor_mapping()
        arguments = []
        for index in range(len(by_index)):
            tensor = by_index[index]
            name, sharding = self._named.get(_handle(tensor), ("", REPLICATED))
            dtype = str(tensor.dtype).removeprefix("torch.")
            arguments.append(Argument(name, tuple(tensor.shape), dtype, sharding))
        return Lowered(context.hlo(), tuple(arguments), names, self.sharding.shape)


def sharding_text(spec: Spec, mesh: MeshShape) -> str:
    """A sharding in HLO's notation.

    Args:
        spec: mesh axis of each dimension.
        mesh: rows X by columns Y, devices in order of rows.
    """
    sizes = {"X": mesh.rows, "Y": mesh.cols}
    used = [axis for axis in spec if axis]
    if all(sizes[axis] == 1 for axis in used):
        return REPLICATED
    others = [axis for axis in sizes if axis not in used]
    devices = np.arange(mesh.n_devices).reshape(mesh.rows, mesh.cols)
    order = devices.transpose([list(sizes).index(axis) for axis in (*used, *others)]).ravel()
    n_copies = mesh.n_devices // int(np.prod([sizes[axis] for axis in used]))
    tiles = [sizes[axis] if axis else 1 for axis in spec] + ([n_copies] if n_copies > 1 else [])
    last = " last_tile_dim_replicate" if n_copies > 1 else ""
    return f"{{devices=[{','.join(map(str, tiles))}]{','.join(map(str, order))}{last}}}"


def _handle(tensor: torch.Tensor) -> int:
    return torch_xla._XLAC._get_tensors_handle([tensor])[0]
