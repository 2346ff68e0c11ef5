"""`--init_from`: weights on disk begin a run, whatever the multipliers of either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from exports import FACTORS, VOCAB, export_of, module_of
from helpers import random_tokens

from mutransformer.errors import ConfigError
from mutransformer.inference.initial import Initializer
from mutransformer.inference.weights import open_weights
from mutransformer.training.module import DecoderModule

TOKENS = random_tokens(2, 16, vocab_size=VOCAB)
OTHERS = {"output_multiplier": 0.25, "input_multiplier": 3.0, "residual_multiplier": 2.0, "qk_scale": 0.6}
SHAPES = {
    "arcee": {},
    "llama": {"activation": "swiglu", "n_kv_head": 2},
    "vector_gains": {"norm_gains": "vector"},
    "scalar_gains": {"norm_gains": "scalar"},
    "qk_norm": {"qk_norm": True, "norm_gains": "vector", "activation": "swiglu"},
    "tied": {"tie_embeddings": True, "norm_gains": "scalar"},
    "no_positions": {"rotary_base": 0.0},
    "biases": {"projection_biases": True},
    "own": {"attention_activation": "elu", "qk_norm": True, "norm_gains": "scalar"},
    "normed_embedding": {"embedding_norm": True, "attention_activation": "elu", "norm_gains": "vector"},
}


def begun_from(path: Path, decoder: dict, **parametrization) -> DecoderModule:
    """A module that begins with the weights at `path`."""
    module = module_of(decoder, **parametrization)
    module.decoder = None  # type: ignore[assignment]
    module.initializer = Initializer(open_weights(str(path)), module.config["decoder"], module.plan)
    module.configure_model()
    return module


def places(module: DecoderModule, root: Path) -> list[Path]:
    """The checkpoint, an export for transformers in many files, and one of plain tensors."""
    export_of(module, root / "hf", shard_bytes=30_000)
    export_of(module, root / "plain", format="safetensors")
    return [root / "hf.ckpt", root / "hf", root / "plain"]


def assert_same_logits(one: DecoderModule, other: DecoderModule) -> None:
    expected = one(TOKENS)
    assert (other(TOKENS) - expected).abs().max() <= 1e-5 * expected.abs().max()  # float32, factors and their inverses


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_those_of_the_weights_whatever_the_multipliers(name, tmp_path):
    module = module_of(SHAPES[name])
    for path in places(module, tmp_path):
        same = begun_from(path, SHAPES[name])
        assert_same_logits(module, same)
        if path.name == "plain" or path.suffix == ".ckpt":
            for tensor, parameter in module.decoder.named_parameters():
                assert torch.equal(parameter, same.decoder.get_parameter(tensor)), tensor
        others = begun_from(path, SHAPES[name], **OTHERS, unembedding_form="B", d_base=8)
        assert others.decoder.logits_multiplier != module.decoder.logits_multiplier
        assert_same_logits(module, others)


@pytest.mark.parametrize("there", ["none", "scalar", "vector"])
@pytest.mark.parametrize("here", ["none", "scalar", "vector"])
def test_gains_that_the_decoder_lacks_go_into_the_matrices_behind(there, here, tmp_path):
    module = module_of({"norm_gains": there})
    for path in places(module, tmp_path):
        assert_same_logits(module, begun_from(path, {"norm_gains": here}, **OTHERS))


def test_a_tied_model_can_begin_an_untied_one(tmp_path):
    module = module_of({"tie_embeddings": True, "norm_gains": "vector"})
    for path in places(module, tmp_path):
        assert_same_logits(module, begun_from(path, {"norm_gains": "none"}, **OTHERS))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "arcee", "apertus"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_that_transformers_made_gives_its_logits_here(kind, is_tied, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB}
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 88, "max_position_embeddings": 16, "hidden_act": "silu"}
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = AutoConfig.for_model(kind, **sizes, rope_parameters=rope, tie_word_embeddings=is_tied)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    shape = {"n_kv_head": 2, "ff_multiple": 2.75, "rotary_base": 500.0, "norm_gains": "vector"}
    shape |= {"norm_eps": config.rms_norm_eps, "qk_norm": kind in ("qwen3", "apertus"), "tie_embeddings": is_tied}
    shape |= {"activation": "swiglu" if kind in ("llama", "qwen3") else "silu"}
    begun = begun_from(tmp_path, shape, **OTHERS)
    with torch.no_grad():
        expected = model(TOKENS).logits
    assert (begun(TOKENS) - expected).abs().max() <= 1e-5 * expected.abs().max()


CHANGES = {
    "d_model": ({"d_model": 64}, "model.decoder.d_model=64: PATH has d_model 32; use 32"),
    "n_layer": ({"n_layer": 3}, "model.decoder.n_layer=3: PATH has n_layer 2; use 2"),
    "d_head": ({"d_head": 16}, "model.decoder.d_head=16: PATH has d_head 8; use 8"),
    "n_kv_head": ({"n_kv_head": 2}, "model.decoder.n_kv_head=2: PATH has n_kv_head 4; use 4"),
    "ff_multiple": ({"ff_multiple": 2.0}, "model.decoder.ff_multiple=2.0: PATH has ff_multiple 4.0; use 4.0"),
    "vocab_size": ({"vocab_size": 400}, "data.vocab_size=400: PATH has vocab_size 384; use 384"),
    "activation": ({"activation": "gelu"}, "PATH has activation relu"),
    "rotary_base": ({"rotary_base": 100.0}, "PATH has rotary_base 10000.0"),
    "norm_eps": ({"norm_eps": 1e-4}, "PATH has norm_eps 1e-05"),
    "qk_norm": ({"qk_norm": True}, "PATH has qk_norm False"),
    "embedding_norm": ({"embedding_norm": True}, "PATH has embedding_norm False"),
    "projection_biases": ({"projection_biases": True}, "PATH has projection_biases False"),
    "attention": ({"attention_activation": "elu"}, "PATH has attention_activation softmax"),
    "tied": ({"tie_embeddings": True}, "PATH has tie_embeddings False"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> list[Path]:
    return places(module_of({}), tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_fit_is_named_in_a_line(name, base):
    decoder, message = CHANGES[name]
    for path in base:
        with pytest.raises(ConfigError) as caught:
            begun_from(path, decoder)
        assert message.replace("PATH", str(path)) in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


def test_a_gain_without_a_place_is_named(tmp_path):
    module = module_of({"qk_norm": True, "norm_gains": "vector"})
    for path in places(module, tmp_path):
        with pytest.raises(ConfigError, match=r"gain_query other than 1.*use vector"):
            begun_from(path, {"qk_norm": True})
    tied = module_of({"tie_embeddings": True})
    (tmp_path / "tied").mkdir()
    for path in places(tied, tmp_path / "tied"):
        assert_same_logits(tied, begun_from(path, {"tie_embeddings": True}))
        with pytest.raises(ConfigError, match=r"gain_final other than 1.*tie_embeddings=false"):
            begun_from(path, {"tie_embeddings": True}, output_multiplier=1.0)


def damaged(root: Path, kind: str) -> Path:
    folder = root / "folder"
    export_of(module_of({}), folder, shard_bytes=30_000, verify=False)
    config = json.loads((folder / "config.json").read_text())
    changes = {
        "another model": {"model_type": "gpt2"},
        "biases": {"attention_bias": True},
        "head": {"head_dim": 4},
        "activation": {"hidden_act": "gelu_10"},
        "positions": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        "type": {"hidden_size": "wide"},
    }
    if kind in changes:
        (folder / "config.json").write_text(json.dumps(config | changes[kind]))
    elif kind == "no JSON":
        (folder / "config.json").write_text("{")
    elif kind == "a list":
        (folder / "config.json").write_text("[]")
    elif kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "no shard":
        next(folder.glob("model-00002*")).unlink()
    elif kind == "cut shard":
        file = next(folder.glob("model-00002*"))
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "no tensor":
        file = folder / "model.safetensors.index.json"
        index = json.loads(file.read_text())
        del index["weight_map"]["lm_head.weight"]
        file.write_text(json.dumps(index))
    elif kind == "nothing":
        return root / "nothing"
    elif kind == "no checkpoint":
        (root / "x.ckpt").write_text("x")
        return root / "x.ckpt"
    return folder


@pytest.mark.parametrize(
    ("kind", "said"),
    {
        "another model": "model type 'gpt2'",
        "biases": "has attention_bias True",
        "head": "has head_dim 4",
        "activation": "has hidden_act 'gelu_10'",
        "positions": "has rope_parameters",
        "type": "config.json cannot be read",
        "no JSON": "is no JSON",
        "a list": "is no mapping",
        "no config": "config.json cannot be read (No such file or directory)",
        "no shard": "safetensors cannot be read",
        "cut shard": "safetensors cannot be read",
        "no tensor": "lacks tensor lm_head.weight",
        "nothing": "there is no such file or folder",
        "no checkpoint": "is not readable",
    }.items(),
)
def test_a_place_without_weights_is_named_in_a_line(kind, said, tmp_path):
    path = damaged(tmp_path, kind)
    with pytest.raises(ConfigError) as caught:
        open_weights(str(path))
    assert said in str(caught.value) and str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_factors_are_not_one():
    """Else nothing here would see a factor that is left out."""
    assert not {1.0} & set(FACTORS.values()) and FACTORS.keys() == OTHERS.keys()
