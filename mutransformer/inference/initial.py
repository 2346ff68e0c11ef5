"""Weights on disk as the initialization of a run (`--init_from`), whatever the multipliers of either."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mutransformer.errors import ConfigError
from mutransformer.inference.weights import Weights, factors
from mutransformer.model.config import DecoderConfig
from mutransformer.mup.plan import Plan

# matrix -> the gain on its input, which it can take in
_BEFORE: Mapping[str, str] = {
    **dict.fromkeys(("w_query", "w_key", "w_value"), "gain_attention"),
    **dict.fromkeys(("w_ff_in", "w_ff_gate"), "gain_feedforward"),
    "unembedding": "gain_final",
}
_TOLERANCE = 1e-6  # relative, of what counts as the same gain: float32 rounding of a factor and its inverse


class Initializer:
    """Fills a decoder's parameters so that it computes what the weights on disk compute.

    Where either has multipliers, they are undone: a tensor is multiplied by its factor there and divided by its own. A
    gain that the decoder does not have is multiplied into the matrices behind it. Where both agree the bits are kept.

    Args:
        weights: from `open_weights`.
        config: shape of the decoder.
        plan: of the decoder.
    Raises:
        ConfigError: the first setting in which the shapes differ, or a gain that has no place in the decoder.
    """

    def __init__(self, weights: Weights, config: DecoderConfig, plan: Plan) -> None:
        _check_fits(weights, config)
        self._weights, self._config = weights, config
        self._factors = factors(config, plan)
        self._layers = {row.name: range(config.n_layer) if row.axes[0] == "layers" else (None,) for row in plan.rows}
        self._before = {matrix: gain for matrix, gain in _BEFORE.items() if matrix in self._layers}
        alone: dict[str, bool] = {  # gains that no matrix can take in
            "gain_embedding": config.embedding_norm,
            "gain_query": config.qk_norm,
            "gain_key": config.qk_norm,
            "gain_final": config.tie_embeddings,
        }
        for gain in (name for name, is_there in alone.items() if is_there):
            for layer in range(config.n_layer) if gain in ("gain_query", "gain_key") else (None,):
                self._check_place(gain, layer)

    def __call__(self, parameters: Mapping[str, torch.Tensor], plan: Plan, seed: int) -> None:
        """Fills `parameters` in place; the seed is not read, as nothing is drawn."""
        with torch.no_grad():
            for name, parameter in parameters.items():
                for layer in self._layers[name]:
                    target = parameter if layer is None else parameter[layer]
                    target.copy_(self._gain(name, layer) if name.startswith("gain_") else self._matrix(name, layer))

    def _matrix(self, name: str, layer: int | None) -> torch.Tensor:
        tensor, factor = self._weights.read(name, layer), self._weights.factors.get(name, 1.0)
        if tensor is None:  # tied there, not here
            tensor, factor = self._weights.read("embedding", None), self._weights.factors.get("embedding", 1.0)
        assert tensor is not None, name
        tensor = _times(tensor, factor / self._factors.get(name, 1.0))
        gain = self._before.get(name)
        if gain is None:
            return tensor
        kept, taken_in = self._needed(gain, layer), self._gain(gain, layer)
        return tensor if _are_close(kept, taken_in) else tensor * (kept / taken_in)

    def _needed(self, gain: str, layer: int | None) -> torch.Tensor:
        """The gain that would give this decoder the function on disk, a value a feature or one."""
        values, factor = self._weights.read(gain, layer), self._weights.factors.get(gain, 1.0)
        values = torch.ones(1) if values is None else values
        return _times(values, factor / self._factors.get(gain, 1.0))

    def _gain(self, gain: str, layer: int | None) -> torch.Tensor:
        """The gain that this decoder gets: the needed one where it fits, else 1."""
        needed = self._needed(gain, layer)
        kind = self._config.norm_gains
        fits = kind == "vector" or (kind == "scalar" and _are_close(needed, needed[:1]))
        return torch.ones_like(needed[:1]) if not fits else needed if kind == "vector" else needed[:1]

    def _check_place(self, gain: str, layer: int | None) -> None:
        if not _are_close(self._needed(gain, layer), self._gain(gain, layer)):
            raise ConfigError(
                "model.decoder.norm_gains",
                self._config.norm_gains,
                f"{self._weights.path} needs a {gain} other than 1, which nothing else can take in",
                "use vector" + (", or tie_embeddings=false" if gain == "gain_final" else ""),
            )


def _check_fits(weights: Weights, config: DecoderConfig) -> None:
    theirs = weights.config
    pairs = {
        name: (getattr(config, name), getattr(theirs, name))
        for name in (
            *("d_model", "n_layer", "d_head", "activation", "attention_activation", "rotary_base", "norm_eps"),
            *("embedding_norm", "qk_norm", "projection_biases", "vocab_size"),
        )
    }
    pairs["n_kv_head"] = config.n_kv_head_, theirs.n_kv_head_
    if config.d_ff != theirs.d_ff:
        pairs["ff_multiple"] = config.ff_multiple, theirs.ff_multiple
    if config.tie_embeddings:
        pairs["tie_embeddings"] = True, theirs.tie_embeddings
    if config.attention_activation != "softmax":
        pairs["attention_normalization"] = config.attention_normalization, theirs.attention_normalization
        if config.attention_normalization == "length":
            pairs["sequence_len"] = config.sequence_len, theirs.sequence_len
    sections: dict[str, str] = dict.fromkeys(("sequence_len", "vocab_size"), "data")
    for name, (ours, other) in pairs.items():
        if ours != other:
            field = f"{sections.get(name, 'model.decoder')}.{name}"
            raise ConfigError(field, ours, f"{weights.path} has {name} {other}", f"use {other}")


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return tensor if factor == 1 else tensor * factor


def _are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a - b).abs() <= _TOLERANCE * b.abs()).all())
