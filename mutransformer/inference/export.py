"""`mutransformer export`: a checkpoint as a folder that transformers loads, or as plain named tensors.

A folder is written under another name, read back and compared, then renamed: it is whole or not there. Tensors go from
the memory-mapped checkpoint to one shard after the other, so that memory holds one shard.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import mutransformer
from mutransformer.data.tokenizer import Tokenizer
from mutransformer.errors import CheckFailed, ConfigError, SaveError
from mutransformer.inference import stock
from mutransformer.inference.weights import MODEL_TYPE, PREFIX, TensorFolder, factors, own_settings
from mutransformer.model.decoder import Decoder
from mutransformer.model.norm import rms_norm
from mutransformer.training.module import DecoderModule

# Relative to the largest logit: what folding factors into float32 weights and another order of sums may come to.
TOLERANCE = 1e-4
SHARD_BYTES = 2 * 10**9

HOW_TO_LOAD = {
    True: 'AutoModelForCausalLM.from_pretrained("{out}")',
    False: 'import mutransformer.inference.transformers_model; AutoModelForCausalLM.from_pretrained("{out}")',
}


@dataclass(frozen=True)
class Tensor:
    """A tensor to be written.

    Args:
        name: in the file.
        n_bytes: its size.
        make: computes it, when its shard is written.
    """

    name: str
    n_bytes: int
    make: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        architecture: class that loads it; empty for plain tensors.
        is_stock: whether transformers has that class.
        n_files: safetensors files.
        largest_difference: of logits, between the checkpoint and the folder read back; None: not compared.
        largest_logit: absolute.
    """

    architecture: str
    is_stock: bool
    n_files: int
    largest_difference: float | None = None
    largest_logit: float | None = None


def check_target(out: str) -> None:
    """Raises ConfigError where a folder cannot be written."""
    path = Path(out)
    remedy = "give a new folder"
    if not out:
        raise ConfigError("out", out, "names no folder", remedy)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError("out", out, "is there and is not an empty folder", remedy)
    above = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not os.access(above, os.W_OK | os.X_OK) or not above.is_dir():
        raise ConfigError("out", out, f"{above} cannot be written to", remedy)


def export(
    module: DecoderModule,
    out: str,
    *,
    format: Literal["hf", "safetensors"],
    tokenizer: Tokenizer,
    separator: int,
    verify: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Writes a folder.

    Args:
        module: from `load_module`.
        out: the folder; not there, or empty.
        format: `hf` for transformers, `safetensors` for our own names.
        tokenizer: of the model; written too with `hf`.
        separator: token between documents; bos and eos of the model.
        verify: read the folder back and compare.
        shard_bytes: files are not larger, but for a tensor that is by itself.
    Raises:
        ConfigError: the folder cannot be written, or is there and not empty.
        SaveError: writing failed; nothing is left.
        CheckFailed: what was read back differs; nothing is left.
    """
    check_target(out)
    with _whole_or_not_at_all(Path(out)) as folder:
        if format == "safetensors":
            settings = {"model_type": MODEL_TYPE, "settings": own_settings(module), "eos_token_id": separator}
            _write_json(folder / "config.json", {**settings, "mutransformer_version": mutransformer.__version__})
            n_files = _write_tensors(folder, _own_tensors(module.decoder, ""), shard_bytes)
            if verify:
                _compare_tensors(folder, module.decoder)
            return Exported("", False, n_files, 0.0 if verify else None)
        return _export_hf(module, folder, out, tokenizer, separator, verify, shard_bytes)


def _export_hf(
    module: DecoderModule,
    folder: Path,
    out: str,
    tokenizer: Tokenizer,
    separator: int,
    verify: bool,
    shard_bytes: int,
) -> Exported:
    from transformers import AutoConfig, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    decoder = module.decoder
    dtype = str(decoder.get_parameter("embedding").dtype).removeprefix("torch.")
    special = {"bos_token_id": separator, "eos_token_id": separator, "dtype": dtype}
    kind = stock.model_type(decoder.config)
    if kind is not None:
        config = AutoConfig.for_model(kind, **stock.settings_of(decoder.config), **special)
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        tensors = stock_tensors(module)
    else:
        from mutransformer.inference.transformers_model import MutransformerConfig, MutransformerForCausalLM

        config = MutransformerConfig(own_settings(module), **special)
        architecture = MutransformerForCausalLM.__name__
        tensors = _own_tensors(decoder, PREFIX)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    # no pad token: were it the separator, transformers would take that at a prompt's beginning for padding
    GenerationConfig(bos_token_id=separator, eos_token_id=separator, use_cache=kind is not None).save_pretrained(folder)
    tokenizer.save(folder)
    n_files = _write_tensors(folder, tensors, shard_bytes)
    exported = Exported(architecture, kind is not None, n_files)
    (folder / "README.md").write_text(_readme(exported, out, separator))
    if not verify:
        return exported
    difference, largest = _compare_logits(folder, module)
    if not difference <= TOLERANCE * max(1.0, largest):
        raise CheckFailed(
            f"logits of {architecture} differ from the checkpoint's by {difference:.3g} (logits up to {largest:.3g}, "
            f"tolerance {TOLERANCE:g} of that); nothing was written to {out}"
        )
    return Exported(architecture, kind is not None, n_files, difference, largest)


def describe(exported: Exported, out: str) -> str:
    """What was written, how it compares and how to load it, in a few lines."""
    files = f"{exported.n_files} safetensors file" + ("s" if exported.n_files > 1 else "")
    if not exported.architecture:
        compared = "not compared" if exported.largest_difference is None else "read back to the same bits"
        return f"{out}: tensors by our names, config.json; {files}, {compared}\nstart a run from it: --init_from {out}"
    kind = "an architecture of transformers" if exported.is_stock else "a class of ours: this package must be imported"
    compared = "logits were not compared"
    if exported.largest_difference is not None:
        compared = (
            f"logits differ from the checkpoint's by {exported.largest_difference:.2g} at most "
            f"(they go up to {exported.largest_logit:.3g})"
        )
    load = HOW_TO_LOAD[exported.is_stock].format(out=out)
    return f"{out}: {exported.architecture}, {kind}; {files}\n{compared}\nload it: {load}"


def stock_tensors(module: DecoderModule) -> Iterator[Tensor]:
    """The weights with all multipliers folded in, by the names of the stock architecture."""
    decoder, config = module.decoder, module.decoder.config
    parameters, scale = dict(decoder.named_parameters()), factors(config, module.plan)
    embedding_VD = parameters["embedding"]
    sizes = {"gain_query": config.d_head, "gain_key": config.d_head}

    def make(ours: str, layer: int | None) -> torch.Tensor:
        factor = scale.get(ours, 1.0)
        if ours.startswith("gain_"):
            gain = parameters.get(ours, torch.ones(config.n_layer, 1, dtype=embedding_VD.dtype))
            gain = gain[0] if layer is None and gain.dim() == 2 else gain if layer is None else gain[layer]
            return (gain * factor).expand(sizes.get(ours, config.d_model)).contiguous()
        if ours == "embedding" and config.embedding_norm:
            return rms_norm(embedding_VD * factor, config.norm_eps, parameters.get("gain_embedding"))
        if ours == "unembedding" and config.tie_embeddings:
            return embedding_VD * scale["embedding"]  # the rest is in the final gain
        tensor = parameters[ours] if layer is None else parameters[ours][layer]
        tensor = tensor if factor == 1 else tensor * factor
        return tensor.flatten(1) if ours == "w_attention_out" else tensor.flatten(0, -2)

    for theirs, ours, layer in stock.tensor_names(config):
        if ours.startswith("gain_"):
            n = sizes.get(ours, config.d_model)
        else:
            n = parameters.get(ours, embedding_VD)[0 if layer is not None else ...].numel()
        yield Tensor(theirs, n * embedding_VD.element_size(), lambda ours=ours, layer=layer: make(ours, layer))


def _own_tensors(decoder: Decoder, prefix: str) -> Iterator[Tensor]:
    for name, parameter in decoder.named_parameters():
        yield Tensor(prefix + name, parameter.nbytes, lambda parameter=parameter: parameter.detach())


def _write_tensors(folder: Path, tensors: Iterator[Tensor], shard_bytes: int) -> int:
    """Writes safetensors, and an index where there are several files; returns their number."""
    shards: list[list[Tensor]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        if tensor.n_bytes > room and shards[-1]:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.n_bytes
    files: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file({t.name: t.make().contiguous() for t in shard}, folder / file, metadata={"format": "pt"})
        (folder / file).chmod((folder / "config.json").stat().st_mode)  # safetensors lets the owner alone read
        files.update(dict.fromkeys((t.name for t in shard), file))
    if len(shards) > 1:
        total = sum(t.n_bytes for shard in shards for t in shard)
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})
    return len(shards)


@torch.no_grad()
def _compare_logits(folder: Path, module: DecoderModule) -> tuple[float, float]:
    """(largest difference, largest logit) on random tokens, through transformers' own loading."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = module.decoder.config
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    shape = (2, min(config.sequence_len, 64))
    tokens_BL = torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = module.decoder(tokens_BL), model.eval()(tokens_BL).logits
    return (ours - theirs).abs().max().item(), ours.abs().max().item()


def _compare_tensors(folder: Path, decoder: Decoder) -> None:
    tensors = TensorFolder(str(folder))
    for name, parameter in decoder.named_parameters():
        written = tensors.get(name)
        if written is None or not torch.equal(written, parameter):
            raise CheckFailed(f"tensor {name} was read back other than it was written; nothing was kept")


@contextmanager
def _whole_or_not_at_all(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes it at the end, or is deleted."""
    temporary = out.absolute().with_name(f".{out.absolute().name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _flush(file)
        temporary.replace(out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise SaveError(f"{out} could not be written ({reason}); nothing was left") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _readme(exported: Exported, out: str, separator: int) -> str:
    name = Path(out).name
    needs = "transformers alone" if exported.is_stock else "the package mutransformer, which registers the class"
    return f"""# {name}

A decoder trained with mutransformer {mutransformer.__version__}, as `{exported.architecture}`.
To load it takes {needs}:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

{HOW_TO_LOAD[exported.is_stock].format(out=name)}
AutoTokenizer.from_pretrained("{name}")
```

In training documents began with token {separator}: put it before a prompt.
"""
