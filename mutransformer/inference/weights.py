"""Weights on disk, read tensor by tensor: a checkpoint of ours, a folder of ours, a folder of a stock architecture.

What differs between ways of writing the same function are factors on tensors. `factors` gives those between our weights
and a model without multipliers whose scores are divided by sqrt(d_head); whoever reads or writes uses these.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mutransformer.errors import ConfigError
from mutransformer.inference import stock
from mutransformer.model.config import DecoderConfig
from mutransformer.model.decoder import Decoder
from mutransformer.mup.config import OptimizerConfig, ParametrizationConfig, RoleMultipliers
from mutransformer.mup.plan import Plan
from mutransformer.training.checkpoint import load_plain
from mutransformer.training.module import DecoderModule

MODEL_TYPE = "mutransformer"  # of config.json in a folder of our own
PREFIX = "decoder."  # of our names where a module or a transformers class holds a decoder


@dataclass(frozen=True)
class Weights:
    """A decoder's weights on disk.

    Args:
        path: where.
        config: the shape; that of a stock architecture in our terms.
        factors: see `factors`; none for a stock architecture.
        read: (our name, layer or None) -> the tensor in our shape, without its layers; None where there is none.
    """

    path: str
    config: DecoderConfig
    factors: Mapping[str, float]
    read: Callable[[str, int | None], torch.Tensor | None]


def factors(config: DecoderConfig, plan: Plan) -> dict[str, float]:
    """Tensor -> what it is multiplied by when multipliers and the scale of scores are folded into the weights.

    The logits' multiplier goes into the unembedding or, where that is tied, into the gain before it.
    """
    embedding = next(row.forward_multiplier for row in plan.rows if row.name == "embedding")
    scores = plan.qk_scale * math.sqrt(config.d_head)
    branches = ("w_attention_out", "b_attention_out", "w_ff_out", "b_ff_out")
    return {
        "embedding": embedding,
        **dict.fromkeys(("gain_query",) if config.qk_norm else ("w_query", "b_query"), scores),
        **dict.fromkeys(branches, plan.residual_multiplier),
        **(
            {"gain_final": plan.logits_multiplier / embedding}
            if config.tie_embeddings
            else {"unembedding": plan.logits_multiplier}
        ),
    }


def load_module(path: str | os.PathLike[str]) -> DecoderModule:
    """A module with the weights of a checkpoint, which stay in the file until they are used (memory-mapped).

    Raises:
        ConfigError: it is no checkpoint of this package.
    """
    checkpoint = load_plain(path)
    module = DecoderModule(**checkpoint["mutransformer"]["module"])
    with torch.device("meta"):
        module.decoder = Decoder(module.config["decoder"], module.plan)
    state = checkpoint["state_dict"]
    module.decoder.load_state_dict({name: state[PREFIX + name] for name in module.decoder.state_dict()}, assign=True)
    return module.eval().requires_grad_(False)


def weights_of(path: str, decoder: Decoder, plan: Plan) -> Weights:
    """The weights that a decoder holds."""
    tensors = dict(decoder.named_parameters())

    def read(name: str, layer: int | None) -> torch.Tensor | None:
        tensor = tensors.get(name)
        return tensor if tensor is None or layer is None else tensor[layer]

    return Weights(path, decoder.config, factors(decoder.config, plan), read)


def open_weights(path: str) -> Weights:
    """The weights of a `.ckpt` file, or of a folder with `config.json` and safetensors; none is read yet.

    Raises:
        ConfigError: there is nothing of the kind, or it is of an architecture that is none of ours.
    """
    if not os.path.exists(path):
        raise ConfigError("init_from", path, "there is no such file or folder", "give a folder or a .ckpt file")
    if os.path.isfile(path):
        module = load_module(path)
        return weights_of(path, module.decoder, module.plan)
    settings = _config_json(path)
    tensors = TensorFolder(path)
    if settings.get("model_type") == MODEL_TYPE:
        config, plan = own_shape(settings["settings"])
        names = {row.name: row.name if row.name in tensors.files else PREFIX + row.name for row in plan.rows}
        tensors.require(names.values())
        return Weights(path, config, factors(config, plan), lambda name, layer: tensors.get(names.get(name), layer))
    config = stock.shape_of(path, settings)
    stock_names = {(ours, layer): name for name, ours, layer in stock.tensor_names(config)}
    tensors.require(stock_names.values())
    shapes = {
        row.name: row.shape[1:] if row.axes[0] == "layers" else row.shape
        for row in config.plan(ParametrizationConfig(), OptimizerConfig()).rows
    }

    def read(name: str, layer: int | None) -> torch.Tensor | None:
        tensor = tensors.get(stock_names.get((name, layer)))
        return None if tensor is None else tensor.reshape(shapes[name])

    return Weights(path, config, {}, read)


def own_settings(module: DecoderModule) -> dict[str, Any]:
    """What a folder of our own says of the model, as plain values; `own_shape` reads it."""
    return {name: module.hyper_parameters[name] for name in ("decoder", "parametrization")}


def own_shape(settings: Mapping[str, Any]) -> tuple[DecoderConfig, Plan]:
    """The shape and the plan from what `own_settings` gives; learning rates of the plan are not the run's."""
    config = DecoderConfig(**settings["decoder"])
    plain = dict(settings["parametrization"])
    for name in ("lr_multiplier", "weight_decay_multiplier"):
        plain[name] = RoleMultipliers(**plain[name])
    return config, config.plan(ParametrizationConfig(**plain), OptimizerConfig())


class TensorFolder:
    """The safetensors files of a folder, read tensor by tensor.

    Args:
        path: folder with `model.safetensors`, or with shards and `model.safetensors.index.json`.
    Attributes:
        files: tensor -> file.
    Raises:
        ConfigError: there are none, or one is not whole.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._open: dict[str, Any] = {}
        index = Path(path, "model.safetensors.index.json")
        try:
            if index.is_file():
                self.files: dict[str, str] = json.loads(index.read_text())["weight_map"]
                for file in set(self.files.values()):
                    self._handle(file)
            else:
                self.files = dict.fromkeys(self._handle("model.safetensors").keys(), "model.safetensors")
        except Exception as error:  # the library has errors of its own beside the system's
            reason = f"its safetensors cannot be read ({error})".replace("\n", " ")
            raise ConfigError("init_from", path, reason, "give a whole folder, or a .ckpt file") from error

    def require(self, names: Any) -> None:
        """Raises ConfigError for the first of `names` that is not there."""
        for name in names:
            if name not in self.files:
                raise ConfigError("init_from", self.path, f"lacks tensor {name}", "give a whole folder")

    def get(self, name: str | None, layer: int | None = None) -> torch.Tensor | None:
        """A tensor, or its slice of one layer; None where there is none of that name."""
        if name is None or name not in self.files:
            return None
        whole = self._handle(self.files[name]).get_slice(name)
        return whole[:] if layer is None else whole[layer]

    def _handle(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            self._open[file] = safe_open(Path(self.path, file), framework="pt")
        return self._open[file]


def _config_json(path: str) -> dict[str, Any]:
    remedy = "give a folder with config.json and safetensors, or a .ckpt file"
    try:
        settings = json.loads(Path(path, "config.json").read_text())
    except OSError as error:
        raise ConfigError("init_from", path, f"config.json cannot be read ({error.strerror})", remedy) from error
    except ValueError as error:
        raise ConfigError("init_from", path, "its config.json is no JSON", remedy) from error
    if not isinstance(settings, dict):
        raise ConfigError("init_from", path, "its config.json is no mapping", remedy)
    return settings
