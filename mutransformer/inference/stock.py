"""Which architectures of transformers can hold a decoder, how they name its tensors, and back. Read by `weights.py`.

All are pre-norm decoders with RMSNorm and rotary positions in the half-split form; what differs between them is in the
two tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mutransformer.errors import ConfigError
from mutransformer.model.config import DecoderConfig

# (has a gate, normalizes queries and keys) -> model type
ARCHITECTURES: Mapping[tuple[bool, bool], str] = {
    (True, False): "llama",
    (True, True): "qwen3",
    (False, False): "arcee",
    (False, True): "apertus",
}
# our activation -> theirs; the gate's where there is one
ACTIVATIONS: Mapping[str, str] = {
    "swiglu": "silu",
    "relu": "relu",
    "gelu": "gelu_pytorch_tanh",
    "silu": "silu",
    "sqrelu": "relu2",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "leaky_relu": "leaky_relu",
    "relu6": "relu6",
    "mish": "mish",
    "hard_silu": "hardswish",
}
# No positions: frequencies over this turn nothing by more than float32 can tell. (There is no switch for it.)
_NO_ROTATION = {"rope_type": "linear", "factor": 1e30, "rope_theta": 10_000.0}


def model_type(config: DecoderConfig) -> str | None:
    """The transformers architecture that computes what the decoder computes; None: there is none.

    A gate's absence, grouped heads, normed queries and keys, gains, tied embeddings, a normed embedding and the absence
    of positions all find a place; biases do not, as none of these has one on the unembedding.
    """
    if config.attention_activation != "softmax" or config.projection_biases or config.activation not in ACTIVATIONS:
        return None
    return ARCHITECTURES[config.activation == "swiglu", config.qk_norm]


def is_tied(config: DecoderConfig) -> bool:
    """Whether the stock model's embeddings are tied: a normed embedding is written as it leaves the norm."""
    return config.tie_embeddings and not config.embedding_norm


def settings_of(config: DecoderConfig) -> dict[str, Any]:
    """The arguments of the architecture's config."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head_,
        "head_dim": config.d_head,
        "hidden_act": ACTIVATIONS[config.activation],
        "max_position_embeddings": config.sequence_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": (
            {"rope_type": "default", "rope_theta": config.rotary_base} if config.rotary_base else _NO_ROTATION
        ),
        "tie_word_embeddings": is_tied(config),
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def shape_of(path: str, settings: Mapping[str, Any]) -> DecoderConfig:
    """The shape of a stock model in our terms.

    Args:
        path: its folder, for messages.
        settings: its `config.json`.
    Raises:
        ConfigError: (init_from) it is of another architecture, or has what the decoder has not.
    """
    from transformers import AutoConfig

    kinds = {name: key for key, name in ARCHITECTURES.items()}
    kind = settings.get("model_type")
    remedy = f"give a folder of {', '.join(kinds)}, one of ours, or a .ckpt file"
    if kind not in kinds:
        raise ConfigError("init_from", path, f"is of model type {kind!r}", remedy)
    try:
        theirs = AutoConfig.for_model(**settings)
    except Exception as error:  # each config class checks in its own way
        reason = f"its config.json cannot be read ({' '.join(str(error).split())})"
        raise ConfigError("init_from", path, reason, remedy) from error
    is_gated, qk_norm = kinds[kind]
    names = {name: ours for ours, name in ACTIVATIONS.items() if (ours == "swiglu") == is_gated}
    rope = theirs.rope_parameters
    has_positions = rope.get("rope_type", "default") == "default"
    for name, is_ours in {
        "hidden_act": theirs.hidden_act in names,
        "head_dim": theirs.head_dim * theirs.num_attention_heads == theirs.hidden_size,
        "attention_bias": not getattr(theirs, "attention_bias", False),
        "mlp_bias": not getattr(theirs, "mlp_bias", False),
        "use_sliding_window": not getattr(theirs, "use_sliding_window", False),
        "rope_parameters": has_positions or rope == _NO_ROTATION,
    }.items():
        if not is_ours:
            raise ConfigError("init_from", path, f"has {name} {getattr(theirs, name)!r}, the decoder has not", remedy)
    multiple = theirs.intermediate_size / theirs.hidden_size
    return DecoderConfig(
        d_model=theirs.hidden_size,
        n_layer=theirs.num_hidden_layers,
        d_head=theirs.head_dim,
        n_kv_head=theirs.num_key_value_heads,
        ff_multiple=multiple if int(multiple * theirs.hidden_size) == theirs.intermediate_size else multiple + 1e-9,
        activation=names[theirs.hidden_act],  # type: ignore[arg-type]
        rotary_base=rope["rope_theta"] if has_positions else 0.0,
        norm_eps=theirs.rms_norm_eps,
        norm_gains="vector",
        qk_norm=qk_norm,
        tie_embeddings=theirs.tie_word_embeddings,
        sequence_len=theirs.max_position_embeddings,
        vocab_size=theirs.vocab_size,
    )


def tensor_names(config: DecoderConfig) -> Iterator[tuple[str, str, int | None]]:
    """(their name, our name, layer or None) of each tensor, in their order."""
    norms = ("attention_layernorm", "feedforward_layernorm")
    if model_type(config) != "apertus":
        norms = ("input_layernorm", "post_attention_layernorm")
    block = {
        norms[0]: "gain_attention",
        "self_attn.q_proj": "w_query",
        "self_attn.k_proj": "w_key",
        "self_attn.v_proj": "w_value",
        **({"self_attn.q_norm": "gain_query", "self_attn.k_norm": "gain_key"} if config.qk_norm else {}),
        "self_attn.o_proj": "w_attention_out",
        norms[1]: "gain_feedforward",
        **({"mlp.gate_proj": "w_ff_gate"} if config.activation == "swiglu" else {}),
        "mlp.up_proj": "w_ff_in",
        "mlp.down_proj": "w_ff_out",
    }
    yield "model.embed_tokens.weight", "embedding", None
    for layer in range(config.n_layer):
        for theirs, ours in block.items():
            yield f"model.layers.{layer}.{theirs}.weight", ours, layer
    yield "model.norm.weight", "gain_final", None
    if not is_tied(config):
        yield "lm_head.weight", "unembedding", None
