"""A decoder with a cache gives the logits of one that reads everything at once; past the window it slides."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers import D_BASE, make_decoder, normal, random_tokens, small

from mutransformer.model.attention import attention_weights
from mutransformer.model.cache import Cache
from mutransformer.model.decoder import Decoder

T = 8  # the window

SHAPES = {
    "plain": {},
    "wide": {"d_model": 8 * D_BASE},
    "grouped": {"d_model": 64, "n_kv_head": 2},
    "multi_query": {"d_model": 64, "n_kv_head": 1},
    "qk_norm": {"qk_norm": True, "norm_gains": "vector"},
    "scalar_gains": {"norm_gains": "scalar", "qk_norm": True, "embedding_norm": True},
    "biases": {"projection_biases": True},
    "tied": {"tie_embeddings": True},
    "no_positions": {"rotary_base": 0.0},
    "swiglu": {"activation": "swiglu"},
    **{
        f"{activation}_{normalization}": {
            "attention_activation": activation,
            "attention_normalization": normalization,
        }
        for activation, normalization in itertools.product(("sqrelu", "elu"), ("length", "causal_count", "sum"))
    },
}
each_shape = pytest.mark.parametrize("name", SHAPES)


def decoder_of(name: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """Weights as initialized, but for biases and gains that would do nothing, and multipliers that are not 1."""
    factors = {"output_multiplier": 3.0, "input_multiplier": 0.5, "residual_multiplier": 0.7, "qk_scale": 1.0}
    decoder = make_decoder(small(sequence_len=T, **SHAPES[name]), dtype=dtype, **factors)
    with torch.no_grad():
        for i, (tensor, parameter) in enumerate(decoder.named_parameters()):
            if tensor.startswith(("b_", "gain_")):
                parameter.add_(0.3 * normal(*parameter.shape, seed=i).to(dtype))
    return decoder.requires_grad_(False)


def in_parts(decoder: Decoder, tokens_BL: torch.Tensor, parts: list[int], cache: Cache | None = None) -> torch.Tensor:
    """Logits at every position, read so many tokens at a time."""
    cache = cache or Cache(decoder.config, len(tokens_BL), chunk=max(parts), dtype=decoder.embedding.dtype)
    return torch.cat([decoder(part_BL, cache=cache) for part_BL in tokens_BL.split(parts, dim=1)], dim=1)


@torch.no_grad()
def slid(decoder: Decoder, tokens_BL: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Logits without a cache, where each token sees itself and the T before it."""
    length = tokens_BL.shape[1]
    band_LM = torch.ones(length, length, dtype=torch.bool).tril().triu(-T)
    monkeypatch.setattr("mutransformer.model.decoder.visible_within", lambda document_BL: band_LM[None, None])
    return decoder(tokens_BL, document_BL=torch.zeros_like(tokens_BL))


@each_shape
@pytest.mark.parametrize("parts", [[1] * T, [3, 3, 1, 1], [T]], ids=["each", "parts", "whole"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_logits_with_a_cache_are_those_without(name, parts, dtype, tolerance):
    decoder, tokens_BL = decoder_of(name, dtype), random_tokens(3, T)
    cached, whole = in_parts(decoder, tokens_BL, parts), decoder(tokens_BL)
    assert (cached - whole).abs().max() <= tolerance * whole.abs().max().clamp(min=1)  # tied logits go up to 50


@each_shape
@pytest.mark.parametrize("parts", [[1] * 3 * T, [5, 1, 1, 7, 3, 7]], ids=["each", "parts"])
def test_past_its_length_it_is_a_sliding_window_and_oneself(name, parts, monkeypatch):
    decoder, tokens_BL = decoder_of(name), random_tokens(2, 3 * T)
    cached = in_parts(decoder, tokens_BL, parts)
    assert not torch.allclose(cached, decoder(tokens_BL), rtol=0, atol=1e-6)
    assert torch.allclose(cached, slid(decoder, tokens_BL, monkeypatch), rtol=1e-12, atol=1e-12)


def test_a_window_of_another_length_is_seen(monkeypatch):
    decoder, tokens_BL = decoder_of("plain"), random_tokens(2, 2 * T)
    expected = slid(decoder, tokens_BL, monkeypatch)
    for window in (T - 1, T + 1):
        cache = Cache(decoder.config, 2, chunk=4, dtype=torch.float64)
        cache.window = window
        assert not torch.allclose(in_parts(decoder, tokens_BL, [4] * 4, cache), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["plain", "biases", "elu_causal_count", "elu_sum", "sqrelu_length"])
def test_rows_of_different_lengths_end_together(name):
    decoder, tokens_BL = decoder_of(name), random_tokens(3, 2 * T)
    lengths = [2 * T, 5, 1]
    padded_BL = torch.zeros_like(tokens_BL)
    for row, length in enumerate(lengths):
        padded_BL[row, -length:] = tokens_BL[row, :length]
    cache = Cache(decoder.config, 3, chunk=4, n_padding=2 * T - torch.tensor(lengths), dtype=torch.float64)
    logits = in_parts(decoder, padded_BL, [4] * 4, cache)[:, -1]
    assert cache.next_position_B.tolist() == lengths
    more = decoder(padded_BL[:, :1], cache=cache)[:, -1]
    for row, length in enumerate(lengths):
        alone = Cache(decoder.config, 1, chunk=1, dtype=torch.float64)
        expected = in_parts(decoder, tokens_BL[row : row + 1, :length], [1] * length, alone)[0, -1]
        assert torch.allclose(logits[row], expected, rtol=1e-12, atol=1e-12), row
        expected = decoder(padded_BL[row : row + 1, :1], cache=alone)[0, -1]
        assert torch.allclose(more[row], expected, rtol=1e-12, atol=1e-12), row


def test_taken_rows_go_on_by_themselves():
    decoder, tokens_BL = decoder_of("grouped"), random_tokens(2, T)
    cache = Cache(decoder.config, 2, chunk=T, dtype=torch.float64)
    decoder(tokens_BL[:, :-1], cache=cache)
    taken = cache.take(torch.tensor([1, 1, 0]))
    last = tokens_BL[:, -1:]
    expected = decoder(last, cache=cache)
    assert torch.equal(taken.next_position_B, torch.full((3,), T - 1))
    assert torch.allclose(decoder(last[[1, 1, 0]], cache=taken), expected[[1, 1, 0]], rtol=0, atol=1e-13)


def test_its_memory_never_changes_shape_nor_place():
    decoder = decoder_of("grouped")
    cache = Cache(decoder.config, 1, chunk=3, dtype=torch.float64)
    places = cache.keys.data_ptr(), cache.values.data_ptr()
    assert cache.keys.shape == (2, 1, 2, T + 3, 8)
    for _ in range(10):
        decoder(random_tokens(1, 3), cache=cache)
    assert (cache.keys.data_ptr(), cache.values.data_ptr()) == places
    with pytest.raises(AssertionError, match="4 tokens"):
        decoder(random_tokens(1, 4), cache=cache)


@pytest.mark.parametrize("activation", ["sqrelu", "elu"])
def test_a_length_is_the_setting_and_not_that_of_the_input(activation):
    config = small(sequence_len=4, attention_activation=activation, attention_normalization="length")
    scores = normal(1, 1, 8, 8)
    whole, part = attention_weights(scores, config), attention_weights(scores[..., :4, :4], config)
    assert torch.equal(whole[..., :4, :4], part)


def test_bfloat16_is_kept_in_bfloat16():
    decoder = decoder_of("grouped", torch.float32)
    decoder.compute_dtype = torch.bfloat16
    cache = Cache(decoder.config, 2, chunk=T, dtype=torch.bfloat16)
    tokens_BL = random_tokens(2, T)
    cached, whole = in_parts(decoder, tokens_BL, [T], cache), decoder(tokens_BL)
    assert cached.dtype == torch.bfloat16
    assert torch.allclose(cached.float(), whole.float(), rtol=2**-5, atol=2**-5)
