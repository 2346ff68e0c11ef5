"""Causal softmax attention by torch_xla's Pallas kernel, which never holds the scores; on TPU alone, with jax."""

from __future__ import annotations

import importlib.util

import torch
import torch_xla.runtime as xr

from mutransformer.errors import ConfigError
from mutransformer.model.axes import ACTIVATIONS
from mutransformer.xla.sharding import Sharding

FIELD = "trainer.strategy.flash_attention"


def check_available() -> None:
    """Raises ConfigError where the kernel cannot run: no TPU, or no jax to make it with."""
    if xr.device_type() != "TPU":
        raise ConfigError(FIELD, True, f"runs on TPU, not on {xr.device_type()} devices", "use false")
    if importlib.util.find_spec("jax") is None:
        raise ConfigError(FIELD, True, "needs jax", 'pip install "torch_xla[pallas]==2.9.0"')


class FlashAttention:
    """The kernel on a mesh, for `model.attention.attending_with`.

    Args:
        sharding: the mesh; batches over X, heads over Y.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding

    def __call__(self, q_BHLK: torch.Tensor, k_BHLK: torch.Tensor, v_BHLK: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of each position to itself and those before it; out_BHLK, same dtype."""
        from torch_xla.experimental.custom_kernel import flash_attention

        spec = self._sharding.spec(q_BHLK, ACTIVATIONS["query"][0])
        return flash_attention(
            q_BHLK, k_BHLK, v_BHLK, causal=True, sm_scale=scale, partition_spec=spec, mesh=self._sharding.mesh
        )
