"""How the decoder's layers run: one after the other, with or without rematerialization.

An engine may run them another way, as XLA does in `mutransformer/xla/scan.py`; it then sets `Decoder.run_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mutransformer.model.cache import LayerCache
from mutransformer.model.linear import ONEDNN
from mutransformer.model.tap import is_recording

Remat = Literal["none", "block", "dots"]
Layer = Mapping[str, torch.Tensor]
# (residual stream, this layer's tensors, what all layers share, this layer's cache if any) -> residual stream
Block = Callable[..., torch.Tensor]

# products with weights, and not those of attention, whose results grow with the square of the length
_DOTS = (torch.ops.aten.mm.default, *ONEDNN)


def loop_layers(
    block: Block,
    x_BLD: torch.Tensor,
    stacked: Layer,
    shared: Layer,
    remat: Remat = "none",
    caches: Sequence[LayerCache] | None = None,
) -> torch.Tensor:
    """Runs the layers in order of depth.

    Args:
        block: one layer.
        x_BLD: residual stream.
        stacked: name -> [n_layer, ...].
        shared: name -> tensor that every layer gets as it is.
        remat: what the backward pass computes again: `none`, the whole `block`, all but matrix products (`dots`).
        caches: one a layer, handed to its block; None: none.
    Returns:
        x_BLD after the last layer.
    """
    # one unbind a tensor: taking each layer's slice by itself would cost a full-size gradient a layer
    slices = {name: tensor.unbind(0) for name, tensor in stacked.items()}
    run: Any = block
    if remat != "none" and torch.is_grad_enabled() and not is_recording():
        policy = {"context_fn": partial(create_selective_checkpoint_contexts, _keep_dots)} if remat == "dots" else {}
        run = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False, **policy)
    for i in range(len(next(iter(slices.values())))):
        cache = () if caches is None else (caches[i],)
        x_BLD = run(x_BLD, {name: parts[i] for name, parts in slices.items()}, shared, *cache)
    return x_BLD


def _keep_dots(ctx: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _DOTS else CheckpointPolicy.PREFER_RECOMPUTE
