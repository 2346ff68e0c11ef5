"""Records, in each training step, how large activations, weights and updates are. Read by `coordcheck.py`.

A Lightning callback: it listens to the step that is made anyway, with or without gradient accumulation, and changes no
bit of it. Everything is reduced on the device; numbers are fetched once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Adam, Adamax, AdamW, NAdam, RAdam

from mutransformer.model.decoder import Decoder
from mutransformer.model.tap import recording
from mutransformer.training.optimizer import Lion
from mutransformer.training.packed import PackedOptimizer

Quantity = Literal["activation", "change", "weight", "update", "update_per_lr", "decay"]

# a change of a weight by less than this share of it is the rounding of float32, not an update
ROUNDING = 2.0**-22

# their steps have the size of the learning rate, whatever that of the gradient
ADAPTIVE = (Adam, AdamW, Adamax, NAdam, RAdam, Lion)

NORMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.abs().mean(),
    "l2": lambda x: x.square().mean().sqrt(),
    "max": lambda x: x.abs().max(),
}


@dataclass(frozen=True, kw_only=True)
class Coordinate:
    """One number of a coordinate check.

    Args:
        step: optimizer steps taken before the one it was recorded in.
        tensor: name of an activation (see `tap`) or a module, or of a parameter.
        layer: block from 0, for activations inside a block; else 0 (all layers of a stacked parameter together).
        quantity: `activation`, the tensor itself; `change`, against the first recorded step on the same batch;
            `weight`, a parameter before the step; `update`, what the step added to it, decay left out;
            `update_per_lr`, that over the group's learning rate in this step, schedule included; `decay`, the share
            of the weight that decay takes off in this step.
        norm: `mean` of the absolute values, `l2` (root mean square) or `max`.
        value: the number.
    """

    step: int
    tensor: str
    layer: int
    quantity: Quantity
    norm: str
    value: float


class CoordinateRecorder(Callback):
    """Collects `Coordinate`s of every step of a fit, in `rows`.

    Inside a `Decoder` every `tap` is recorded; in any other module the output of each submodule without submodules.

    Args:
        norms: names from `NORMS`, to be recorded besides `mean`.
        same_batch: whether every step sees the same batch, so that changes of activations mean something.
    """

    def __init__(self, norms: Sequence[str] = (), same_batch: bool = True) -> None:
        self.norms = tuple(dict.fromkeys(("mean", *norms)))
        self.same_batch = same_batch
        self.rows: list[Coordinate] = []
        self.is_adaptive = False  # whether the optimizers take steps whose size does not depend on the gradient's
        self._first: dict[tuple[str, int], Tensor] = {}
        self._listening = ExitStack()
        self._step: int | None = None  # the step under way, which may have several batches

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._step is not None:
            return
        self._step = trainer.global_step
        self._pending: list[tuple[str, int, Quantity, str, Tensor]] = []
        self._counts: dict[str, int] = {}
        self._n_forward = 0
        self._rates = dict(_rates(trainer))
        self._before = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
        self.is_adaptive = all(isinstance(optimizer, ADAPTIVE) for optimizer in trainer.optimizers)
        self._listening.enter_context(recording(self._tapped))
        for name, module in pl_module.named_modules():
            if name and not any(module.children()) and not isinstance(module, Decoder):
                self._listening.callback(module.register_forward_hook(self._module_hook(name)).remove)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # Lightning accumulates: the step is still to come
            return
        self._listening.close()
        n_forward = max(1, self._n_forward)
        parts: dict[tuple[str, int, Quantity, str], list[Tensor]] = {}
        for tensor, index, quantity, norm, value in self._pending:
            # a stack of layers is passed once a forward: the n-th call of a forward is layer n
            layer = index % (self._counts[tensor] // n_forward) if self._n_forward else 0
            parts.setdefault((tensor, layer, quantity, norm), []).append(value)
        with torch.no_grad():
            for name, parameter in pl_module.named_parameters():
                for key, value in self._of_parameter(name, parameter.detach()):
                    parts[key] = [value]
        # one transfer for all of a step; micro-batches are averaged
        values = torch.stack([torch.stack(of).mean() for of in parts.values()]).tolist()
        self.rows += [
            Coordinate(step=self._step or 0, tensor=tensor, layer=layer, quantity=quantity, norm=norm, value=value)
            for (tensor, layer, quantity, norm), value in zip(parts, values, strict=True)
        ]
        self._step = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._listening.close()

    def _tapped(self, name: str, x: Tensor) -> None:
        self._n_forward += name == "embedding"  # the first of a forward pass
        self._activation(name, x)

    def _module_hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.is_floating_point():
                self._activation(name, output.detach())

        return hook

    @torch.no_grad()
    def _activation(self, name: str, x: Tensor) -> None:
        index = self._counts.get(name, 0)
        self._counts[name] = index + 1
        quantities: dict[Quantity, Tensor] = {"activation": x}
        if self.same_batch:
            if (first := self._first.get((name, index))) is not None:
                quantities["change"] = x - first
            else:
                self._first[name, index] = x.clone()  # what comes after may work in place
        for quantity, tensor in quantities.items():
            for norm in self.norms:
                self._pending.append((name, index, quantity, norm, NORMS[norm](tensor.float())))

    def _of_parameter(self, name: str, after: Tensor) -> Iterator[tuple[tuple[str, int, Quantity, str], Tensor]]:
        short, before = name.removeprefix("decoder."), self._before[name]
        lr, decay, is_decoupled = self._rates.get(name, (0.0, 0.0, False))
        update = after - before * (1 - lr * decay if is_decoupled else 1.0)
        update = update.where(update.abs() > ROUNDING * before.abs(), 0.0)
        for norm in self.norms:
            yield (short, 0, "weight", norm), NORMS[norm](before)
            yield (short, 0, "update", norm), NORMS[norm](update)
            if lr:
                yield (short, 0, "update_per_lr", norm), NORMS[norm](update) / lr
        yield (short, 0, "decay", "mean"), torch.tensor(lr * decay, device=after.device)


def _rates(trainer: Trainer) -> Iterator[tuple[str, tuple[float, float, bool]]]:
    """Parameter name -> (learning rate, weight decay, whether that is taken off the weight) of its group, as now."""
    names = {parameter: name for name, parameter in trainer.lightning_module.named_parameters()}
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            is_decoupled = isinstance(optimizer, (AdamW, Lion)) or "decoupled_decay" in group
            if isinstance(optimizer, PackedOptimizer):
                is_decoupled = is_decoupled or optimizer.algorithm != "sgd"
            decay = group.get("decoupled_decay", group.get("weight_decay", 0.0))
            for parameter in group["params"]:
                yield names[parameter], (float(group["lr"]), decay, is_decoupled)
