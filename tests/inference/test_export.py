from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import exports
import pytest
import torch
from exports import export_of, module_of
from helpers import random_tokens, write_checkpoint
from safetensors.torch import load_file

from mutransformer.data.tokenizer import ByteTokenizer
from mutransformer.errors import CheckFailed, ConfigError, SaveError
from mutransformer.inference import export as export_room
from mutransformer.inference.decoding import generate
from mutransformer.inference.sampling import Sampling
from mutransformer.inference.stock import ACTIVATIONS
from mutransformer.inference.weights import load_module

TOKENS = random_tokens(2, 16, vocab_size=exports.VOCAB)
STOCK = {  # shape -> the architecture it goes into
    "llama": ({"activation": "swiglu"}, "LlamaForCausalLM"),
    "llama_grouped": ({"activation": "swiglu", "n_kv_head": 2, "norm_gains": "vector"}, "LlamaForCausalLM"),
    "llama_tied": ({"activation": "swiglu", "tie_embeddings": True}, "LlamaForCausalLM"),
    "qwen3": ({"activation": "swiglu", "qk_norm": True, "norm_gains": "vector", "n_kv_head": 1}, "Qwen3ForCausalLM"),
    "arcee": ({"activation": "relu", "norm_gains": "scalar"}, "ArceeForCausalLM"),
    "arcee_no_positions": ({"activation": "gelu", "rotary_base": 0.0}, "ArceeForCausalLM"),
    "arcee_normed_embedding": ({"embedding_norm": True, "norm_gains": "vector"}, "ArceeForCausalLM"),
    "arcee_tied_normed": ({"embedding_norm": True, "tie_embeddings": True}, "ArceeForCausalLM"),
    "apertus": ({"activation": "sqrelu", "qk_norm": True}, "ApertusForCausalLM"),
    **{
        f"activation_{name}": ({"activation": name, "n_layer": 1}, "ArceeForCausalLM")
        for name in ACTIVATIONS
        if name != "swiglu"
    },
}
OWN = {
    "biases": {"projection_biases": True, "activation": "swiglu"},
    "attention": {"attention_activation": "elu", "attention_normalization": "length"},
    "activation": {"activation": "softplus"},
}

PLAIN_TRANSFORMERS = """
import json, sys
sys.modules["mutransformer"] = None  # importing it fails
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
try:
    import mutransformer.model
    raise SystemExit("the package is there")
except ImportError:
    pass
case = torch.load(sys.argv[1])
for folder, (architecture, logits, greedy) in case["stock"].items():
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == architecture, (folder, type(model))
    difference = (model(case["tokens"]).logits - logits).abs().max() / logits.abs().max()
    assert difference < 1e-5, (folder, difference)
    ids = AutoTokenizer.from_pretrained(folder)(case["text"])["input_ids"]
    assert ids == case["ids"], folder
    prompt = torch.tensor([[model.config.bos_token_id, *ids]])
    # without an end: two ids that are equally likely but for rounding must not decide how long it is
    text = model.generate(prompt, max_new_tokens=len(greedy), do_sample=False, eos_token_id=None, use_cache=True)
    assert text[0, prompt.shape[1]:].tolist() == greedy, (folder, text, greedy)
for folder in case["own"]:
    try:
        AutoModelForCausalLM.from_pretrained(folder)
        raise SystemExit(f"{folder} loaded")
    except ValueError as error:
        assert "mutransformer" in str(error)
print("done")
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with an export of every shape, and its module."""
    root = tmp_path_factory.mktemp("exports")
    modules = {name: module_of(shape) for name, (shape, _) in STOCK.items()}
    modules |= {name: module_of(shape) for name, shape in OWN.items()}
    return root, modules, {name: export_of(module, root / name) for name, module in modules.items()}


def test_every_shape_goes_into_its_architecture(written):
    _, _, exported = written
    named = {name: each.architecture for name, each in exported.items()}
    assert named == {name: architecture for name, (_, architecture) in STOCK.items()} | dict.fromkeys(
        OWN, "MutransformerForCausalLM"
    )
    for name, each in exported.items():
        assert each.is_stock == (name in STOCK)
        # the same tensors in other products, in float32; with its own class nothing is folded
        assert each.largest_difference <= (5e-6 * each.largest_logit if name in STOCK else 0), name
        assert each.largest_logit > 0.5, name


def test_plain_transformers_loads_what_is_stock_and_names_the_package_for_what_is_not(written, tmp_path):
    root, modules, _ = written
    text = "ï </s>東"
    ids = ByteTokenizer().encode(text).tolist()
    prompt, case = [1, *ids], {"tokens": TOKENS, "text": text, "ids": ids, "stock": {}}
    case["own"] = [str(root / name) for name in OWN]
    for name, (_, architecture) in STOCK.items():
        events = generate(modules[name].decoder, [prompt], Sampling(temperature=0), [torch.Generator()], max_tokens=5)
        greedy = [event.token for event in events]
        case["stock"][str(root / name)] = (architecture, modules[name](TOKENS), greedy)
    torch.save(case, tmp_path / "case.pt")
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_TRANSFORMERS, str(tmp_path / "case.pt")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=300,
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stdout + done.stderr


def test_our_class_loads_with_the_package_and_generates(written):
    from transformers import AutoModelForCausalLM

    root, modules, _ = written
    model = AutoModelForCausalLM.from_pretrained(root / "attention")
    assert torch.equal(model(TOKENS).logits, modules["attention"](TOKENS))
    prompt = TOKENS[:1, :5]
    events = generate(
        modules["attention"].decoder, prompt.tolist(), Sampling(temperature=0), [torch.Generator()], max_tokens=8
    )
    text = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert text[0, 5:].tolist() == [event.token for event in events]
    with pytest.raises(ValueError, match="padded"):
        model(TOKENS, attention_mask=torch.zeros_like(TOKENS))


def test_shards_hold_the_same_tensors(written, tmp_path):
    root, modules, _ = written
    exported = export_of(modules["llama"], tmp_path / "sharded", shard_bytes=20_000)
    index = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())
    whole = load_file(root / "llama/model.safetensors")
    assert exported.n_files == len(set(index["weight_map"].values())) > 3
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for file in set(index["weight_map"].values()):
        part = load_file(tmp_path / "sharded" / file)
        assert sum(tensor.nbytes for tensor in part.values()) <= 20_000 or len(part) == 1
        assert all(torch.equal(tensor, whole[name]) for name, tensor in part.items())


def test_plain_tensors_are_ours_to_the_bit(written, tmp_path):
    _, modules, _ = written
    module = modules["biases"]
    exported = export_of(module, tmp_path / "plain", format="safetensors")
    tensors = load_file(tmp_path / "plain/model.safetensors")
    parameters = dict(module.decoder.named_parameters())
    assert tensors.keys() == parameters.keys()
    assert all(torch.equal(tensors[name], parameter) for name, parameter in parameters.items())
    settings = json.loads((tmp_path / "plain/config.json").read_text())["settings"]
    assert settings["decoder"]["d_model"] == 32 and settings["parametrization"]["output_multiplier"] == 3
    assert exported.largest_difference == 0


def nothing_left(folder: Path) -> bool:
    return [path.name for path in folder.iterdir() if path.suffix != ".ckpt"] == []


def test_a_folder_that_computes_something_else_is_refused(tmp_path, monkeypatch):
    factors = export_room.factors
    monkeypatch.setattr(export_room, "factors", lambda *of: factors(*of) | {"w_ff_out": 0.501})
    with pytest.raises(CheckFailed, match="differ from the checkpoint's"):
        export_of(module_of({}), tmp_path / "wrong")
    assert nothing_left(tmp_path)
    export_of(module_of({}), tmp_path / "wrong", verify=False)
    assert (tmp_path / "wrong/model.safetensors").is_file()


def test_a_target_that_cannot_be_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/mine.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    module = module_of({})
    for target in (tmp_path / "there", tmp_path / "file", tmp_path / "file/below", ""):
        with pytest.raises(ConfigError, match="out="):
            export_room.export(module, str(target), format="hf", tokenizer=ByteTokenizer(), separator=1)
    assert (tmp_path / "there/mine.txt").read_text() == "x"
    (tmp_path / "empty").mkdir()
    export_of(module, tmp_path / "empty", verify=False)
    assert (tmp_path / "empty/config.json").is_file()


@pytest.mark.parametrize("format", ["hf", "safetensors"])
def test_a_file_that_cannot_grow_leaves_nothing(format, tmp_path):
    """A limit on the size of files stands for a full disk."""
    module = module_of({})
    size, limits = 4 * module.plan.count, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, limits[1]))
    try:
        with pytest.raises(SaveError, match="could not be written"):
            export_room.export(module, str(tmp_path / "x"), format=format, tokenizer=ByteTokenizer(), separator=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert nothing_left(tmp_path)


def anonymous_bytes() -> int:
    """Memory of this process that is no mapped file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise LookupError("RssAnon")


@pytest.mark.slow
def test_memory_holds_a_shard_and_not_the_model(tmp_path):
    module = module_of({"d_model": 512, "n_layer": 16, "d_head": 64, "activation": "swiglu"})
    n_bytes, shard_bytes = 4 * module.plan.count, 16 * 2**20
    checkpoint = write_checkpoint(module, tmp_path / "x.ckpt")
    del module
    assert n_bytes > 16 * shard_bytes
    export_of(module_of({"activation": "swiglu"}), tmp_path / "first", verify=False)  # imports
    peak, before, is_done = [0], anonymous_bytes(), threading.Event()

    def watch() -> None:
        while not is_done.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    export_room.export(
        load_module(checkpoint),
        str(tmp_path / "x"),
        format="hf",
        tokenizer=ByteTokenizer(),
        separator=1,
        verify=False,
        shard_bytes=shard_bytes,
    )
    is_done.set()
    thread.join()
    assert peak[0] - before < 3 * shard_bytes, f"{peak[0] - before:,} bytes for shards of {shard_bytes:,}"
