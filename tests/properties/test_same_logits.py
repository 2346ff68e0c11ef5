"""Training, evaluation, cached decoding, an export and a run begun from it: the same logits at any width and shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import D_BASE, VOCAB, make_module, mup, normal, random_tokens, small, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from mutransformer.data.tokenizer import ByteTokenizer
from mutransformer.inference import stock, transformers_model  # registers the class of ours
from mutransformer.inference.export import export
from mutransformer.inference.initial import Initializer
from mutransformer.inference.weights import load_module, open_weights
from mutransformer.model.cache import Cache
from mutransformer.model.tap import recording
from mutransformer.training.module import DecoderModule

L = 9
MULTIPLIERS = ("input_multiplier", "output_multiplier", "residual_multiplier", "qk_scale")


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a decoder of 1 to 6 times the base width."""
    n_head = 2 * draw(st.integers(1, 6))
    shape = {
        "d_model": D_BASE * n_head // 2,
        "n_kv_head": draw(st.sampled_from([n for n in range(1, n_head + 1) if n_head % n == 0])),
        "ff_multiple": draw(st.sampled_from([1.0, 2.7, 4.0])),
        "activation": draw(st.sampled_from(["relu", "gelu", "swiglu", "swiglu", "sqrelu", "softplus"])),
        "attention_activation": draw(st.sampled_from(["softmax"] * 3 + ["elu", "sqrelu"])),
        "attention_normalization": draw(st.sampled_from(["length", "causal_count", "sum"])),
        "rotary_base": draw(st.sampled_from([10_000.0, 100.0, 0.0])),
        "norm_gains": draw(st.sampled_from(["none", "vector", "scalar"])),
        "projection_biases": draw(st.sampled_from([False] * 3 + [True])),
        "sequence_len": L,
    }
    return shape | {name: draw(st.booleans()) for name in ("embedding_norm", "qk_norm", "tie_embeddings")}


@st.composite
def parametrizations(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a parametrization whose every factor may differ from 1."""
    factors = {name: draw(st.sampled_from([1.0, 0.3, 2.5])) for name in MULTIPLIERS}
    depth = draw(st.sampled_from([{}, {"depth_rule": "completep", "n_base_layer": 1}]))
    return {**factors, **depth, "unembedding_form": draw(st.sampled_from("AB"))}


def made(shape: dict[str, Any], parametrization: dict[str, Any]) -> DecoderModule:
    """A module with weights, biases and gains that do something."""
    module = make_module(small(**shape), mup(**parametrization))
    module.configure_model()
    with torch.no_grad():
        for i, (name, parameter) in enumerate(module.decoder.named_parameters()):
            if name.startswith(("b_", "gain_")):
                parameter.add_(0.3 * normal(*parameter.shape, seed=i).float())
    return module


def as_seen_by_the_loss(module: DecoderModule, tokens_BL: torch.Tensor) -> torch.Tensor:
    """The logits from which a training or validation step makes its loss."""
    seen: dict[str, torch.Tensor] = {}
    with recording(seen.__setitem__):
        module.loss_sum({"tokens": torch.cat([tokens_BL, tokens_BL[:, :1]], dim=1)})
    return seen["logits"]


@settings(max_examples=30)
@given(shapes(), parametrizations())
def test_logits_are_the_same_everywhere(tmp_path_factory, shape, parametrization):
    from transformers import AutoModelForCausalLM

    folder, tokens_BL = tmp_path_factory.mktemp("same"), random_tokens(2, L)
    module = made(shape, parametrization)
    expected = as_seen_by_the_loss(module.train(), tokens_BL)
    logits = {"evaluation": as_seen_by_the_loss(module.eval(), tokens_BL)}
    module.requires_grad_(False)

    checkpoint = write_checkpoint(module, folder / "x.ckpt")
    loaded = load_module(checkpoint)
    cache = Cache(loaded.decoder.config, len(tokens_BL), chunk=4)
    parts = [loaded.decoder(part, cache=cache) for part in tokens_BL.split([4, 1, 1, 3], dim=1)]
    logits["cached decoding"] = torch.cat(parts, dim=1)

    out = str(folder / "hf")
    exported = export(loaded, out, format="hf", tokenizer=ByteTokenizer(), separator=1, verify=False)
    assert exported.is_stock == (stock.model_type(loaded.decoder.config) is not None)
    logits["export"] = AutoModelForCausalLM.from_pretrained(out)(tokens_BL).logits

    begun = make_module(
        small(**{**shape, "norm_gains": "vector"}), mup(**{**parametrization, "output_multiplier": 0.7})
    )
    begun.initializer = Initializer(open_weights(str(checkpoint)), begun.config["decoder"], begun.plan)
    begun.configure_model()
    logits["a run begun from it"] = begun(tokens_BL)

    assert expected.shape == (2, L, VOCAB) and expected.std() > 1e-3
    for name, theirs in logits.items():
        # float32 over a few sums of a hundred: 1e-5 of the largest, at any size of the logits
        assert (theirs - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1), name


@pytest.mark.parametrize("multiplier", MULTIPLIERS)
def test_a_multiplier_that_is_lost_is_seen(multiplier, tmp_path: Path):
    tokens_BL = random_tokens(2, L)
    module = made({"sequence_len": L, "d_model": 4 * D_BASE}, {multiplier: 2.5})
    lost = made({"sequence_len": L, "d_model": 4 * D_BASE}, {})
    assert (module(tokens_BL) - lost(tokens_BL)).abs().max() > 1e-3


def test_the_class_of_ours_is_registered():
    from transformers import AutoConfig

    assert AutoConfig.for_model("mutransformer").__class__ is transformers_model.MutransformerConfig
