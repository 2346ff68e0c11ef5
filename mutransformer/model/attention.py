"""Causal self-attention: softmax by kernels that never hold all scores, and a plain path for other nonlinearities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from mutransformer.model.activations import ACTIVATIONS, elu
from mutransformer.model.blockwise import blockwise_attention
from mutransformer.model.cache import LayerCache
from mutransformer.model.config import DecoderConfig
from mutransformer.model.layers import Layer
from mutransformer.model.linear import contract, linear
from mutransformer.model.norm import rms_norm
from mutransformer.model.rotary import rotate
from mutransformer.model.tap import is_recording, tap

MASKED = -1e30
SCORES = "bhlk,bhmk->bhlm"  # the product that makes them

# (q_BHLK, k_BHLK, v_BHLK, scale) -> out_BHLK, causal
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]

_kernel: Kernel | None = None

_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sqrelu": ACTIVATIONS["sqrelu"],
    "elu": lambda s: elu(s) + 1,
}


@contextmanager
def attending_with(kernel: Kernel) -> Iterator[None]:
    """Has an engine's kernel for causal softmax attention used in the block, on XLA."""
    global _kernel
    previous, _kernel = _kernel, kernel
    try:
        yield
    finally:
        _kernel = previous


def causal_scores(q_BHLK: torch.Tensor, k_BHMK: torch.Tensor, scale: float) -> torch.Tensor:
    """scale * q k^T before the mask, in float32 or wider.

    Returns:
        scores_BHLM.
    """
    wide = torch.promote_types(q_BHLK.dtype, torch.float32)
    return contract(SCORES, q_BHLK.to(wide), k_BHMK.to(wide)) * scale


def visible_within(document_BL: torch.Tensor) -> torch.Tensor:
    """Which keys a query sees where attention stays within documents: those of its own, up to itself.

    Args:
        document_BL: number of the document at each position.
    Returns:
        visible_BHLM bool, with one head for all.
    """
    length = document_BL.shape[1]
    past_LM = torch.ones(length, length, dtype=torch.bool, device=document_BL.device).tril()
    return (past_LM & (document_BL[:, :, None] == document_BL[:, None, :])).unsqueeze(1)


def attention_weights(
    scores_BHLM: torch.Tensor, config: DecoderConfig, visible: torch.Tensor | None = None
) -> torch.Tensor:
    """Masks what a query may not see and turns scores into weights.

    Args:
        scores_BHLM: square in L and M where `visible` is None.
        config: attention_activation, attention_normalization, sequence_len, norm_eps.
        visible: from `visible_within` or a cache; None: all up to the query itself.
    Returns:
        weights_BHLM, same dtype; rows sum to one for softmax and, to norm_eps, for `sum`.
    Source:
        softmax; relu^2 and elu + 1 as in lucaslingle/mu_transformer, which divides by the length or the sum.
        The length is the setting, not that of the input: a token's logits do not depend on what comes after it.
    """
    if visible is None:
        length = scores_BHLM.shape[-1]
        visible = torch.ones(length, length, dtype=torch.bool, device=scores_BHLM.device).tril()
    masked = scores_BHLM.masked_fill(~visible, MASKED)
    if config.attention_activation == "softmax":
        return masked.softmax(-1)
    raw = _ACTIVATIONS[config.attention_activation](masked)
    if config.attention_normalization == "length":
        return raw / config.sequence_len
    if config.attention_normalization == "causal_count":
        return raw / visible.sum(-1, keepdim=True)
    return raw / (config.norm_eps + raw.sum(-1, keepdim=True))


def plain_attention(
    q_BHLK: torch.Tensor,
    k_BHMK: torch.Tensor,
    v_BHMK: torch.Tensor,
    config: DecoderConfig,
    scale: float,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention written out, for every nonlinearity; heads of q, k and v are equal in number.

    Returns:
        out_BHLK in v's dtype; scores and weights in float32 or wider.
    """
    scores = tap("scores", causal_scores(q_BHLK, k_BHMK, scale))
    weights = tap("weights", attention_weights(scores, config, visible))
    return contract("bhlm,bhmk->bhlk", weights, v_BHMK.to(weights.dtype)).to(v_BHMK.dtype)


def fused_attention(
    q_BHLK: torch.Tensor,
    k_BHMK: torch.Tensor,
    v_BHMK: torch.Tensor,
    config: DecoderConfig,
    scale: float,
    visible: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention by a kernel that never holds all scores; as `plain_attention` otherwise."""
    if is_recording():
        with torch.no_grad():
            scores = causal_scores(q_BHLK, k_BHMK, scale)
            tap("scores", scores)
            tap("weights", attention_weights(scores, config, visible))
    if visible is None and q_BHLK.dtype == torch.bfloat16 and q_BHLK.device.type == "cpu":
        return blockwise_attention(q_BHLK, k_BHMK, v_BHMK, scale)
    return F.scaled_dot_product_attention(
        q_BHLK, k_BHMK, v_BHMK, attn_mask=visible, is_causal=visible is None, scale=scale
    )


def _repeat_heads(x_BGLK: torch.Tensor, n_head: int) -> torch.Tensor:
    """Gives each query head its key/value head: x_BGLK -> out_BHLK."""
    n_kv_head = x_BGLK.shape[1]
    if n_kv_head == n_head:
        return x_BGLK
    return x_BGLK.unsqueeze(2).expand(-1, -1, n_head // n_kv_head, -1, -1).flatten(1, 2)


def attention(
    x_BLD: torch.Tensor,
    layer: Layer,
    config: DecoderConfig,
    scale: float,
    rotary: torch.Tensor | None,
    visible: torch.Tensor | None = None,
    cache: LayerCache | None = None,
) -> torch.Tensor:
    """Self-attention of one block, from normalized input to what is added to the residual stream.

    Args:
        x_BLD: normalized block input.
        layer: this layer's tensors by name, without the layer dimension, in x's dtype.
        config: shape.
        scale: factor on the scores.
        rotary: from `rotary_table`, or None.
        visible: from `visible_within` or a cache; None: all up to the query itself.
        cache: keys and values of tokens before x, to which x's are added; None: x is all there is.
    Returns:
        out_BLD, same dtype.
    """
    x_BLD = tap("attention_input", x_BLD)

    def project(name: str) -> torch.Tensor:
        heads = linear(x_BLD, layer[f"w_{name}"], layer.get(f"b_{name}"))
        return tap(name, heads.transpose(1, 2))

    q_BHLK, k_BGLK, v_BGLK = project("query"), project("key"), project("value")
    if config.qk_norm:
        q_BHLK = rms_norm(q_BHLK, config.norm_eps, layer.get("gain_query"))
        k_BGLK = rms_norm(k_BGLK, config.norm_eps, layer.get("gain_key"))
    if rotary is not None:
        q_BHLK = tap("query_rotated", rotate(q_BHLK, rotary))
        k_BGLK = tap("key_rotated", rotate(k_BGLK, rotary))
    if cache is not None:
        k_BGLK, v_BGLK = cache.extend(k_BGLK, v_BGLK)
    k_BHLK, v_BHLK = _repeat_heads(k_BGLK, config.n_head), _repeat_heads(v_BGLK, config.n_head)
    is_softmax = config.attention_activation == "softmax"
    if is_softmax and x_BLD.device.type != "xla":  # where torch's kernel would be taken apart, softmax in bfloat16
        out_BHLK = fused_attention(q_BHLK, k_BHLK, v_BHLK, config, scale, visible)
    elif is_softmax and _kernel is not None and visible is None and not is_recording():
        out_BHLK = _kernel(q_BHLK, k_BHLK, v_BHLK, scale)
    else:
        out_BHLK = plain_attention(q_BHLK, k_BHLK, v_BHLK, config, scale, visible)
    out_BHLK = tap("attention_mixed", out_BHLK)
    out_BLD = linear(out_BHLK.transpose(1, 2), layer["w_attention_out"], layer.get("b_attention_out"), n_summed=2)
    return tap("attention_output", out_BLD)
