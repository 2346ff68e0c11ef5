"""The training step that would run on a slice, traced without weights: for `mutransformer plan`.

It is the module's own: loss, backward pass, clipping and the optimizer, with the sharding that the strategy would give.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from mutransformer.model.attention import attending_with
from mutransformer.model.axes import marking
from mutransformer.model.decoder import Decoder
from mutransformer.training.module import DecoderModule, compute_dtype
from mutransformer.training.optimizer import build_optimizer
from mutransformer.xla import flash
from mutransformer.xla import sharding as xla_sharding
from mutransformer.xla.aot import AbstractDevices, Lowered
from mutransformer.xla.scan import choose_layers
from mutransformer.xla.sharding import Sharding, specs_of_state

TOKENS = "batch.tokens"


def lower_step(
    module: DecoderModule, sharding: Sharding, n_sequences: int, precision: str, flash_attention: bool = False
) -> Lowered:
    """The program of one optimizer step.

    Args:
        module: before its weights are made; it keeps what was traced.
        sharding: mesh and table.
        n_sequences: in the batch, on all devices together.
        precision: `trainer.precision`.
        flash_attention: by the strategy's kernel, or written out.
    Returns:
        Arguments: parameters by name, optimizer state as `name.buffer`, `batch.tokens`. Results: `loss`, `grad_norm`,
        then parameters and state again.
    Raises:
        ConfigError: the kernel is not for this model, or jax is not there to make it with.
    """
    devices = AbstractDevices(sharding)
    config = module.config["decoder"]
    if flash_attention:
        flash.check_available(config)
    with torch.device("meta"):
        decoder = Decoder(config, module.plan)
    specs = {}
    for name, parameter in list(decoder.named_parameters()):
        specs[name] = sharding.spec(parameter, decoder.axes[name])
        tensor = devices.tensor(name, parameter.shape, parameter.dtype, specs[name])
        decoder.register_parameter(name, torch.nn.Parameter(tensor))
    decoder.compute_dtype = compute_dtype(precision)
    choose_layers(decoder)
    module.decoder = decoder
    parameters = dict(decoder.named_parameters())

    optimizer = build_optimizer(parameters.items(), module.plan, module.optimizer_config)
    updated = dict(parameters)
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        for buffer, spec in specs_of_state(parameter, specs[name], state).items():
            key = f"{name}.{buffer}"
            state[buffer] = devices.tensor(key, state[buffer].shape, state[buffer].dtype, spec)
            updated[key] = state[buffer]

    tokens = devices.tensor(TOKENS, (n_sequences, config.sequence_len + 1), torch.int64, ("X", None))
    with ExitStack() as marks:
        xla_sharding.activate(sharding)
        marks.callback(xla_sharding.activate, None)
        marks.enter_context(marking(sharding.mark))
        if flash_attention:
            marks.enter_context(attending_with(flash.FlashAttention(sharding)))
        out = module.step_over({"tokens": tokens}, optimizer)
        return devices.lower([*out.items(), *updated.items()])
