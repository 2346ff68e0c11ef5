"""Causal softmax attention by torch_xla's Pallas kernel, which never holds the scores; on TPU alone, with jax."""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from mutransformer.errors import ConfigError
from mutransformer.model.axes import ACTIVATIONS
from mutransformer.model.config import DecoderConfig

if TYPE_CHECKING:
    from mutransformer.xla.sharding import Sharding

FIELD = "trainer.strategy.flash_attention"


def check_model(config: DecoderConfig) -> None:
    """Raises ConfigError where the model has another attention than the kernel's, or sequences that it cannot cut."""
    if config.attention_activation != "softmax":
        raise ConfigError(
            FIELD, True, f"is softmax attention, and the model has {config.attention_activation}", "use false"
        )
    length = config.sequence_len
    if length not in (128, 256, 512) and length % 1024:  # torch_xla's blocks, of the backward pass above all
        raise ConfigError(
            FIELD, True, f"takes sequences of 128, 256, 512 or a multiple of 1024, not of {length}", "use false"
        )


def check_available(config: DecoderConfig) -> None:
    """Raises ConfigError where the kernel cannot run: no TPU, another model, or no jax to make it with."""
    import torch_xla.runtime as xr

    if xr.device_type() != "TPU":
        raise ConfigError(FIELD, True, f"runs on TPU, not on {xr.device_type()} devices", "use false")
    check_model(config)
    if importlib.util.find_spec("jax") is None:
        raise ConfigError(FIELD, True, "needs jax", 'pip install "torch_xla[pallas]==2.9.0"')


class FlashAttention:
    """The kernel on a mesh, for `model.attention.attending_with`.

    Args:
        sharding: the mesh; batches over X, heads over Y.
    """

    def __init__(self, sharding: Sharding) -> None:
        from torch_xla.experimental import custom_kernel

        self._sharding = sharding
        custom_kernel.trace_pallas = _lower_kernel

    def __call__(self, q_BHLK: torch.Tensor, k_BHLK: torch.Tensor, v_BHLK: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of each position to itself and those before it; out_BHLK, same dtype."""
        from torch_xla.experimental.custom_kernel import flash_attention

        spec = self._sharding.spec(q_BHLK, ACTIVATIONS["query"][0])
        return flash_attention(
            q_BHLK, k_BHLK, v_BHLK, causal=True, sm_scale=scale, partition_spec=spec, mesh=self._sharding.mesh
        )


# what a kernel was lowered to, so that it is once and not every layer and step
_lowered: dict[str, str | None] = {}


def _lower_kernel(
    kernel: Callable[..., Any],
    *args: Any,
    static_argnums: Any = None,
    static_argnames: Any = None,
    use_cache: bool = False,
    **kwargs: Any,
) -> tuple[str | None, list[torch.Tensor]]:
    """Does what torch_xla's `trace_pallas` does, for TPU wherever it runs, and as jax exports programs.

    Exported kernels are for compilers a few weeks older than jax too. Else jax 0.7.1 writes them in a version that
    libtpu 0.0.21, which torch_xla 2.9.0 goes with, cannot read (pytorch/xla issue 9614).
    """
    import jax
    from jax._src.interpreters.mlir import LoweringParameters
    from torch_xla.experimental.custom_kernel import _extract_backend_config, to_jax_shape_dtype_struct

    shapes = [to_jax_shape_dtype_struct(arg) if torch.is_tensor(arg) else arg for arg in args]
    key = repr((kernel, shapes, static_argnums, static_argnames, sorted(kwargs.items())))
    if key not in _lowered:
        jitted = jax.jit(kernel, static_argnums=static_argnums, static_argnames=static_argnames)
        parameters = LoweringParameters(for_export=True)
        lowered = jitted.trace(*shapes, **kwargs).lower(lowering_platforms=("tpu",), _private_parameters=parameters)
        _lowered[key] = _extract_backend_config(lowered.compiler_ir())
    return _lowered[key], [arg for arg in args if torch.is_tensor(arg)]
