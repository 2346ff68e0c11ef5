"""The decoder: embedding, blocks, unembedding. Arithmetic only; shapes and multipliers come from the plan."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from mutransformer.model.attention import attention, visible_within
from mutransformer.model.cache import Cache
from mutransformer.model.config import DecoderConfig
from mutransformer.model.feedforward import feedforward
from mutransformer.model.norm import rms_norm
from mutransformer.model.rotary import rotary_table
from mutransformer.model.tap import tap
from mutransformer.mup.plan import Plan


class Decoder(nn.Module):
    """A pre-norm decoder whose layers are stacked: one parameter `[n_layer, ...]` a kind.

    Args:
        config: shape.
        plan: of the same shape; gives parameters' shapes and the multipliers of the forward pass.
    Shapes:
        tokens_BL int64 -> logits_BLV in the compute dtype
    Attributes:
        compute_dtype: dtype that parameters are cast to at use (masters keep theirs); None: the masters' own.
    """

    def __init__(self, config: DecoderConfig, plan: Plan) -> None:
        super().__init__()
        self.config = config
        self.embedding_multiplier = next(row.forward_multiplier for row in plan.rows if row.name == "embedding")
        self.logits_multiplier = plan.logits_multiplier
        self.residual_multiplier = plan.residual_multiplier
        self.qk_scale = plan.qk_scale
        self.compute_dtype: torch.dtype | None = None
        self._stacked = tuple(row.name for row in plan.rows if row.axes[0] == "layers")
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
        config = self.config
        embedding_VD = self.get_parameter("embedding")
        dtype = self.compute_dtype or embedding_VD.dtype

        x_BLD = _times(F.embedding(tokens_BL, embedding_VD).to(dtype), self.embedding_multiplier)
        if config.embedding_norm:
            x_BLD = self._norm(x_BLD, "gain_embedding")
        tap("embedding", x_BLD)

        visible = None if document_BL is None else visible_within(document_BL)
        layer_caches = None
        if cache is not None:
            positions, visible, layer_caches = cache.advance(tokens_BL.shape[1])
        rotary = None
        if config.rotary_base:
            if positions is None:
                positions = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
            rotary = rotary_table(positions, config.d_head, config.rotary_base, dtype)

        stacked = {name: self.get_parameter(name).to(dtype).unbind(0) for name in self._stacked}
        for i in range(config.n_layer):
            layer = {name: slices[i] for name, slices in stacked.items()}
            normed_BLD = rms_norm(x_BLD, config.norm_eps, layer.get("gain_attention"))
            layer_cache = None if layer_caches is None else layer_caches[i]
            mixed_BLD = attention(normed_BLD, layer, config, self.qk_scale, rotary, visible, layer_cache)
            x_BLD = x_BLD + _times(mixed_BLD, self.residual_multiplier)
            normed_BLD = rms_norm(x_BLD, config.norm_eps, layer.get("gain_feedforward"))
            x_BLD = x_BLD + _times(feedforward(normed_BLD, layer, config), self.residual_multiplier)
            tap("residual", x_BLD)

        x_BLD = _times(self._norm(x_BLD, "gain_final"), self.logits_multiplier)
        unembedding_VD = embedding_VD if config.tie_embeddings else self.get_parameter("unembedding")
        bias_V = self.get_parameter("b_unembedding").to(dtype) if config.projection_biases else None
        logits_BLV = F.linear(x_BLD, unembedding_VD.to(dtype), bias_V)
        tap("logits", logits_BLV)
        return logits_BLV

    def _norm(self, x_BLD: torch.Tensor, gain: str) -> torch.Tensor:
        has_gain = self.config.norm_gains != "none"
        return rms_norm(x_BLD, self.config.norm_eps, self.get_parameter(gain).to(x_BLD.dtype) if has_gain else None)


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1 else x * factor
