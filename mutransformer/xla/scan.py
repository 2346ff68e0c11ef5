"""Layers as one loop of the compiled program: the time to compile does not grow with depth.

torch_xla's `scan` traces the layer once, forward and backward. Under SPMD its backward pass needs jax for one call that
copies shardings from weights to gradients; here the layer marks both itself, so that call is left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.partitioners import _extract_fwd_bwd_modules
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch_xla.experimental.scan import _scan_impl_pytree, value_and_grad_partitioned

from mutransformer.errors import ConfigError
from mutransformer.model.attention import SCORES
from mutransformer.model.decoder import Decoder
from mutransformer.model.layers import Block, Layer, Remat, loop_layers
from mutransformer.model.linear import CONTRACT
from mutransformer.model.tap import is_recording
from mutransformer.xla.sharding import MARK


class ScannedLayers:
    """Runs the layers as `loop_layers` does, compiled as a loop; one by one where a recorder listens.

    Args:
        remat: what the backward pass computes again.
    """

    def __init__(self, remat: Remat) -> None:
        self._partition = _PARTITIONS[remat]
        # scan keeps its traces by the function's identity, so each is made once
        self._functions: dict[Any, Callable[..., Any]] = {}

    def __call__(self, block: Block, x_BLD: torch.Tensor, stacked: Layer, shared: Layer) -> torch.Tensor:
        """See `loop_layers`; tensors of `shared` must not need gradients."""
        if is_recording():
            return loop_layers(block, x_BLD, stacked, shared)
        n_layer = len(next(iter(stacked.values())))
        # one more dimension rather than a carry: whole numbers cannot be carried, and a carry would get gradients
        repeated = {name: tensor.expand(n_layer, *tensor.shape) for name, tensor in shared.items()}
        # traced with the gradients that are wanted: with another key in evaluation than in training
        key = (tuple(stacked), tuple(shared), torch.is_grad_enabled())
        if key not in self._functions:
            self._functions[key] = self._function(block)
        xs = {"layer": dict(stacked), "shared": repeated}
        forward, alias_input, backward = value_and_grad_partitioned(
            self._functions[key], x_BLD, xs, partition_fn=self._partition, is_fn_pure=True
        )
        leaves, structure = tree_flatten(xs)
        return _Scan.apply(forward, alias_input, backward, structure, x_BLD, *leaves)

    def _function(self, block: Block) -> Callable[..., Any]:
        def one_layer(x_BLD: torch.Tensor, slices: Any) -> tuple[torch.Tensor, None]:
            return block(x_BLD, slices["layer"], slices["shared"]), None

        return one_layer


def choose_layers(decoder: Decoder) -> None:
    """Sets how a decoder that is on the device runs its layers.

    Raises:
        ConfigError: rematerialization without a scan.
    """
    config = decoder.config
    if config.scan_layers:
        decoder.run_layers = ScannedLayers(config.remat)
    elif config.remat != "none":
        raise ConfigError("model.decoder.remat", config.remat, "needs scan_layers on XLA", "use scan_layers true")


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Any, alias_input: Any, backward: Any, structure: Any, init: Any, *leaves: Any
    ) -> Any:
        xs = tree_unflatten(list(leaves), structure)
        with torch.no_grad():
            carry, (_, partial_activations) = _scan_impl_pytree(forward, init, xs)
        ctx.backward_of_layer = backward
        ctx.save_for_backward(*alias_input(partial_activations, xs))
        return carry

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.no_grad():
            grad_init, grad_xs = _scan_impl_pytree(
                ctx.backward_of_layer, gradient, (None, list(ctx.saved_tensors)), reverse=True
            )
        return None, None, None, None, grad_init, *tree_flatten(grad_xs)[0]


def _keeping(*targets: Any) -> Callable[..., Any]:
    """A partitioner: the backward pass gets a layer's inputs and what `targets` made of the residual stream.

    All else is computed again, gathered weights above all: kept from the forward pass they would undo their sharding.
    So is the product that makes attention's scores: they are the largest array by far, and soon made.
    What is kept has a mark, as the loop's buffers have none of their own and GSPMD would guess.
    """

    def partition(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        placeholders = [node for node in joint.graph.nodes if node.op == "placeholder"]
        of_stream = {placeholders[0]}
        of_backward = {node for node in placeholders if "tangents" in node.name}
        kept = [node for node in placeholders if node not in of_backward]
        for node in joint.graph.nodes:
            for group in (of_stream, of_backward):
                if any(source in group for source in node.all_input_nodes):
                    group.add(node)
            is_kept = (node.target in targets and SCORES not in node.args) or (targets and _is_of_flash_attention(node))
            if is_kept and node in of_stream and node not in of_backward:
                kept.append(node)
        return _extract_fwd_bwd_modules(joint, kept, [], num_fwd_outputs=num_fwd_outputs)

    return partition


def _is_of_flash_attention(node: torch.fx.Node) -> bool:
    """Whether a node is a result of the kernel, which the backward pass needs and would run it again for."""
    source = node.all_input_nodes[0].target if node.target is operator.getitem else None
    return "fa_custom_forward" in str(source)


_PARTITIONS: dict[str, Callable[..., Any]] = {
    "none": _keeping(MARK),
    "block": _keeping(),
    "dots": _keeping(CONTRACT),
}
