from __future__ import annotations

import math

import pytest
import torch
from helpers import normal, small

from mutransformer.model import attention as attention_room
from mutransformer.model.attention import attention, attention_weights, plain_attention, visible_within
from mutransformer.model.config import DecoderConfig

D, K, L = 32, 8, 6
H = D // K
SCALE = 0.4

WEIGHT_KINDS = [("softmax", "causal_count")] + [
    (activation, normalization)
    for activation in ("sqrelu", "elu")
    for normalization in ("length", "causal_count", "sum")
]
N_KV_HEADS = pytest.mark.parametrize("n_kv_head", [None, 2, 1], ids=["multi_head", "grouped", "multi_query"])


def config_of(activation="softmax", normalization="causal_count", **changes) -> DecoderConfig:
    return small(
        d_model=D, attention_activation=activation, attention_normalization=normalization, norm_eps=0.01, **changes
    )


def layer_of(config: DecoderConfig, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """This shape's attention tensors of one layer, of a size that makes scores of about 1."""
    sizes = config.axis_sizes()
    shapes = {spec.name: [sizes[axis] for axis in spec.axes[1:]] for spec in config.tensors() if spec.is_in_block}
    return {
        name: (normal(*shape, seed=i) * (D**-0.5 if name.startswith("w_") else 0.5)).to(dtype)
        for i, (name, shape) in enumerate(shapes.items())
    }


def raw_weight(score: float, activation: str) -> float:
    if activation == "softmax":
        return math.exp(score)
    if activation == "sqrelu":
        return max(score, 0.0) ** 2
    return score + 1 if score > 0 else math.exp(score)


def weights_by_loops(scores_LM: torch.Tensor, config: DecoderConfig) -> torch.Tensor:
    """Rows of weights over the visible positions, straight from the definitions."""
    length = len(scores_LM)
    weights = torch.zeros(length, length, dtype=torch.float64)
    for i in range(length):
        raw = [raw_weight(float(scores_LM[i, j]), config.attention_activation) for j in range(i + 1)]
        divisor = {
            "softmax": sum(raw),
            "length": config.sequence_len,
            "causal_count": i + 1,
            "sum": 0.01 + sum(raw),
        }["softmax" if config.attention_activation == "softmax" else config.attention_normalization]
        weights[i, : i + 1] = torch.tensor(raw, dtype=torch.float64) / divisor
    return weights


@pytest.mark.parametrize("activation, normalization", WEIGHT_KINDS)
def test_weights_are_those_of_the_definition(activation, normalization):
    config = config_of(activation, normalization)
    scores_BHLM = 2 * normal(2, 3, L, L)
    weights = attention_weights(scores_BHLM, config)
    for b in range(2):
        for h in range(3):
            expected = weights_by_loops(scores_BHLM[b, h], config)
            assert torch.allclose(weights[b, h], expected, rtol=0, atol=1e-14)


# The whole of a block's attention, written out head by head


def normed(x_LK: torch.Tensor, gain: torch.Tensor | int) -> torch.Tensor:
    return x_LK / (x_LK.pow(2).mean(-1, keepdim=True) + 0.01).sqrt() * gain


def attention_by_loops(x_BLD: torch.Tensor, layer: dict[str, torch.Tensor], config: DecoderConfig) -> torch.Tensor:
    out_BLD = torch.zeros_like(x_BLD)
    for b, x_LD in enumerate(x_BLD):
        for h in range(H):
            g = h // (H // config.n_kv_head_)
            q, k, v = (
                x_LD @ layer[f"w_{name}"][head].T + (layer[f"b_{name}"][head] if f"b_{name}" in layer else 0)
                for name, head in (("query", h), ("key", g), ("value", g))
            )
            if config.qk_norm:
                q, k = normed(q, layer.get("gain_query", 1)), normed(k, layer.get("gain_key", 1))
            weights_LM = weights_by_loops(SCALE * (q @ k.T), config)
            out_BLD[b] += weights_LM @ v @ layer["w_attention_out"][:, h].T
    return out_BLD + layer.get("b_attention_out", 0)


@N_KV_HEADS
@pytest.mark.parametrize("projection_biases", [False, True])
@pytest.mark.parametrize("activation, normalization", [WEIGHT_KINDS[0], WEIGHT_KINDS[2], WEIGHT_KINDS[6]])
def test_attention_is_what_the_loops_say(activation, normalization, projection_biases, n_kv_head):
    config = config_of(activation, normalization, n_kv_head=n_kv_head, projection_biases=projection_biases)
    layer, x_BLD = layer_of(config), normal(2, L, D, seed=9)
    ours = attention(x_BLD, layer, config, SCALE, rotary=None)
    assert torch.allclose(ours, attention_by_loops(x_BLD, layer, config), rtol=0, atol=1e-12)


# torch's kernel against the plain path


@N_KV_HEADS
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("has_documents", [False, True])
def test_fused_kernel_equals_the_plain_path_forward_and_backward(
    has_documents, n_kv_head, dtype, tolerance, monkeypatch
):
    config = config_of(n_kv_head=n_kv_head)
    visible = visible_within(torch.arange(2 * L).view(2, L) // 3) if has_documents else None

    def out_and_gradients():
        layer = {name: tensor.requires_grad_() for name, tensor in layer_of(config, dtype).items()}
        x = normal(2, L, D, seed=9).to(dtype).requires_grad_()
        out = attention(x, layer, config, SCALE, None, visible)
        loss = (out * normal(2, L, D, seed=8).to(dtype)).sum()
        used = [tensor for name, tensor in layer.items() if "ff" not in name]
        return [out.detach(), *torch.autograd.grad(loss, [x, *used])]

    fused, calls = out_and_gradients(), []

    def plain(q, k, v, attn_mask, is_causal, scale):
        calls.append(is_causal)
        return plain_attention(q, k, v, config, scale, attn_mask)

    monkeypatch.setattr(attention_room.F, "scaled_dot_product_attention", plain)
    unfused = out_and_gradients()
    assert calls == [not has_documents]
    for ours, other in zip(fused, unfused, strict=True):
        # sums of at most 12 x 32 products, each result compared with its own size
        assert (ours - other).abs().max() <= tolerance * max(1.0, other.abs().max().item())


def test_grouped_heads_equal_one_head_each_with_repeated_weights():
    grouped, full = config_of(n_kv_head=2, projection_biases=True), config_of(projection_biases=True)
    layer, x_BLD = layer_of(grouped), normal(2, L, D, seed=9)
    repeated = {
        name: tensor.repeat_interleave(2, dim=0) if name in ("w_key", "w_value", "b_key", "b_value") else tensor
        for name, tensor in layer.items()
    }
    assert {name: tensor.shape for name, tensor in repeated.items()} == {
        name: tensor.shape for name, tensor in layer_of(full).items()
    }
    ours = attention(x_BLD, layer, grouped, SCALE, rotary=None)
    assert torch.allclose(ours, attention(x_BLD, repeated, full, SCALE, rotary=None), rtol=0, atol=1e-14)


@pytest.mark.parametrize("norm_gains, size", [("none", None), ("vector", K), ("scalar", 1)])
def test_qk_norm_normalizes_each_head(norm_gains, size):
    config = config_of(qk_norm=True, norm_gains=norm_gains, n_kv_head=2, projection_biases=True)
    layer, x_BLD = layer_of(config), normal(2, L, D, seed=9)
    gains = [layer[name] for name in ("gain_query", "gain_key") if name in layer]
    assert [tuple(gain.shape) for gain in gains] == ([] if size is None else [(size,)] * 2)
    ours = attention(x_BLD, layer, config, SCALE, rotary=None)
    assert torch.allclose(ours, attention_by_loops(x_BLD, layer, config), rtol=0, atol=1e-12)
    without = config_of(n_kv_head=2, projection_biases=True)
    assert not torch.allclose(ours, attention(x_BLD, layer, without, SCALE, rotary=None), rtol=0, atol=1e-3)


def test_bfloat16_scores_and_weights_of_the_plain_path_are_float32():
    config = config_of("elu", "sum")
    q, k, v = (normal(1, H, L, K, seed=i).bfloat16() for i in range(3))
    ours = plain_attention(q, k, v, config, SCALE)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, plain_attention(q.float(), k.float(), v.float(), config, SCALE).bfloat16())
