"""The decoder: embedding, blocks, unembedding. Arithmetic only; shapes and multipliers come from the plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mutransformer.model.attention import attention, visible_within
from mutransformer.model.axes import used
from mutransformer.model.cache import Cache, LayerCache
from mutransformer.model.config import DecoderConfig
from mutransformer.model.feedforward import feedforward
from mutransformer.model.layers import Layer, loop_layers
from mutransformer.model.linear import linear
from mutransformer.model.loss import cross_entropy_sum, linear_cross_entropy_sum
from mutransformer.model.norm import rms_norm
from mutransformer.model.rotary import rotary_table
from mutransformer.model.tap import is_recording, tap
from mutransformer.mup.plan import Plan


class Decoder(nn.Module):
    """A pre-norm decoder whose layers are stacked: one parameter `[n_layer, ...]` a kind.

    Args:
        config: shape.
        plan: of the same shape; gives parameters' shapes and the multipliers of the forward pass.
    Shapes:
        tokens_BL int64 -> logits_BLV in the compute dtype
    Attributes:
        axes: name of a parameter -> the logical axis of each dimension.
        compute_dtype: dtype that parameters are cast to at use (masters keep theirs); None: the masters' own.
        run_layers: (block, x_BLD, stacked tensors, shared tensors) -> x_BLD; an engine may put its own here.
    """

    def __init__(self, config: DecoderConfig, plan: Plan) -> None:
        super().__init__()
        self.config = config
        self.embedding_multiplier = next(row.forward_multiplier for row in plan.rows if row.name == "embedding")
        self.logits_multiplier = plan.logits_multiplier
        self.residual_multiplier = plan.residual_multiplier
        self.qk_scale = plan.qk_scale
        self.compute_dtype: torch.dtype | None = None
        self.run_layers: Callable[..., torch.Tensor] = partial(loop_layers, remat=config.remat)
        self.axes = {row.name: row.axes for row in plan.rows}
        for row in plan.rows:
            self.register_parameter(row.name, nn.Parameter(torch.empty(row.shape)))

    def forward(
        self,
        tokens_BL: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_BL: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Logits of the next token at every position.

        Args:
            tokens_BL: token ids.
            positions: positions_L or positions_BL; None: 0, 1, ...
            document_BL: number of the document at each position, in which attention stays; None: a row is one text.
            cache: of the tokens before these, which it then holds too; gives positions and visibility itself.
        Returns:
            logits_BLV.
        """
        return self.unembed(self.stream(tokens_BL, positions, document_BL, cache))

    def loss_sum(
        self,
        tokens_BL: torch.Tensor,
        targets_BL: torch.Tensor,
        mask_BL: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        document_BL: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sum of the cross-entropy over the targets that count, in nats, without ever holding all logits.

        Args:
            tokens_BL: token ids.
            targets_BL: token ids that follow them.
            mask_BL: 1 where a target counts, 0 where it does not; None: all count.
            positions: see `forward`.
            document_BL: see `forward`.
        Returns:
            Scalar, float32 or wider.
        """
        x_BLD = self.stream(tokens_BL, positions, document_BL)
        if x_BLD.device.type == "xla":  # where the compiler decides what is held
            return cross_entropy_sum(self.unembed(x_BLD), targets_BL, mask_BL)
        if is_recording():
            with torch.no_grad():
                self.unembed(x_BLD)
        x_BLD = _times(x_BLD, self.logits_multiplier)
        masters = self._unembedding(self.get_parameter("embedding").dtype)
        return linear_cross_entropy_sum(x_BLD, *masters, targets_BL, mask_BL)

    def stream(
        self,
        tokens_BL: torch.Tensor,
        positions: torch.Tensor | None = None,
        document_BL: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """The residual stream after the last layer, normalized.

        Args:
            tokens_BL: token ids.
            positions: see `forward`.
            document_BL: see `forward`.
            cache: see `forward`.
        Returns:
            x_BLD.
        """
        config = self.config
        embedding_VD = self.get_parameter("embedding")
        dtype = self._dtype
        stacked = {name: self.get_parameter(name).to(dtype) for name, axes in self.axes.items() if axes[0] == "layers"}

        # rows are cast when looked up, so that gradients of a token's many occurrences add up in the masters' dtype
        embedding_VD = used(embedding_VD, self.axes["embedding"])
        x_BLD = _times(F.embedding(tokens_BL, embedding_VD).to(dtype), self.embedding_multiplier)
        if config.embedding_norm:
            x_BLD = rms_norm(x_BLD, config.norm_eps, self._used("gain_embedding", dtype))
        x_BLD = tap("embedding", x_BLD)

        shared = {}
        layer_caches = None
        if cache is not None:
            positions, shared["visible"], layer_caches = cache.advance(tokens_BL.shape[1])
        if config.rotary_base:
            if positions is None:
                positions = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
            shared["rotary"] = rotary_table(positions, config.d_head, config.rotary_base, dtype)
        if document_BL is not None:
            shared["document"] = document_BL
        if layer_caches is None:
            x_BLD = self.run_layers(self.block, x_BLD, stacked, shared)
        else:
            x_BLD = loop_layers(self.block, x_BLD, stacked, shared, caches=layer_caches)

        return rms_norm(x_BLD, config.norm_eps, self._used("gain_final", dtype))

    def unembed(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """Logits of the next token from the normalized stream: x_BLD -> logits_BLV."""
        return tap("logits", linear(_times(x_BLD, self.logits_multiplier), *self._unembedding(self._dtype)))

    def _unembedding(self, dtype: torch.dtype) -> tuple[Any, torch.Tensor | None]:
        """weight_VD and bias_V, if there is one."""
        name = "embedding" if self.config.tie_embeddings else "unembedding"
        return self._used(name, dtype), self._used("b_unembedding", dtype)

    def _used(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """A parameter outside of the layers as it is multiplied with; None if there is no such."""
        return used(self.get_parameter(name).to(dtype), self.axes[name]) if name in self.axes else None

    @property
    def _dtype(self) -> torch.dtype:
        return self.compute_dtype or self.get_parameter("embedding").dtype

    def compile_block(self) -> None:
        """Has `torch.compile` make the block's code, once for all layers: its time does not grow with depth."""
        # torch's own look at the block's arguments, slices of stacked weights, warns of what it does not need
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        self.block = torch.compile(self.block, dynamic=False)  # type: ignore[method-assign]

    def block(self, x_BLD: torch.Tensor, layer: Layer, shared: Layer, cache: LayerCache | None = None) -> torch.Tensor:
        """One layer: attention and feed-forward, each normalized before and added to the residual stream.

        Args:
            x_BLD: residual stream.
            layer: this layer's tensors by name, in x's dtype.
            shared: `rotary`, from `rotary_table`, `document`_BL, and `visible`, from a cache; each if there is one.
            cache: this layer's, or None.
        Returns:
            x_BLD, same dtype.
        """
        config, rotary = self.config, shared.get("rotary")
        layer = {name: used(tensor, self.axes[name][1:]) for name, tensor in layer.items()}
        visible = visible_within(shared["document"]) if "document" in shared else shared.get("visible")
        normed_BLD = rms_norm(x_BLD, config.norm_eps, layer.get("gain_attention"))
        mixed_BLD = attention(normed_BLD, layer, config, self.qk_scale, rotary, visible, cache)
        x_BLD = x_BLD + _times(mixed_BLD, self.residual_multiplier)
        normed_BLD = rms_norm(x_BLD, config.norm_eps, layer.get("gain_feedforward"))
        x_BLD = x_BLD + _times(feedforward(normed_BLD, layer, config), self.residual_multiplier)
        return tap("residual", x_BLD)


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1 else x * factor
