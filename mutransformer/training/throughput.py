"""How fast a run is: floating-point operations of a step by one stated formula, and the peaks of devices.

Read by `run_metrics.py` and `mutransformer bench`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import torch

from mutransformer.model.config import DecoderConfig
from mutransformer.mup.plan import Plan
from mutransformer.xla.slices import device_peak

MfuConvention = Literal["causal", "palm"]

# In no product: a table that is looked up, factors and biases. All other tensors are multiplied once with every token.
_LOOKED_UP = "embedding"
_ELEMENTWISE = ("gain_", "b_")


def flops_per_token(config: DecoderConfig, plan: Plan, convention: MfuConvention = "causal") -> float:
    """Floating-point operations of a training step (forward and backward) over its tokens.

    Matrix products alone: 6 a weight that is multiplied (the unembedding too, an embedding that is looked up not), and
    for scores and weighted values 12 * n_layer * n_head * d_head * keys. Keys a query: all sequence_len of them by
    `palm`, the (sequence_len + 1) / 2 that a causal mask leaves on average by `causal`. Norms, activations, softmax,
    the loss and the optimizer are left out, and so is whatever an implementation computes twice.

    Args:
        config: shape; sequence_len is read.
        plan: of the same shape.
        convention: which keys count.
    Source:
        arXiv 2204.02311, appendix B (`palm`, there with the embedding among the weights).
    """
    length = config.sequence_len
    n_keys = length if convention == "palm" else (length + 1) / 2
    n_weights = sum(
        row.count
        for row in plan.rows
        if not row.name.startswith(_ELEMENTWISE) and (row.name != _LOOKED_UP or config.tie_embeddings)
    )
    return 6 * n_weights + 12 * config.n_layer * config.n_head * config.d_head * n_keys


def bytes_held(config: DecoderConfig, plan: Plan, n_tokens: int, dtype: torch.dtype) -> float:
    """Bytes that a training step on one CPU or GPU holds at most, by what the code keeps.

    For `remat: none`, softmax attention and AdamW.

    Masters, gradients and two moments: 16 a parameter, and its cast to a narrower dtype. Of each layer and token: for
    attention the input, its norm, queries, keys, values and what they give, twice; for the feed-forward the input, its
    norm, and one, or with a gate three, tensors of the hidden width. Buffers of a fixed size are left out: chunks of
    logits and of scores.

    Args:
        config: shape.
        plan: of the same shape.
        n_tokens: of a micro-batch.
        dtype: what is computed in.
    """
    cast = dtype.itemsize if dtype.itemsize < 4 else 0
    attention = config.n_head * config.d_head
    kept = 4 * config.d_model + 5 * attention + (3 if config.activation == "swiglu" else 1) * config.d_ff
    return (16 + cast) * plan.count + n_tokens * config.n_layer * kept * dtype.itemsize


# Peak operations a second of one device, dense, without sparsity: (bfloat16, TF32, float32); None: it has no such unit.
# The first name that is part of the device's own, in lower case, holds.
# Sources: NVIDIA's data sheets for H200, H100, A100, L40S, L40, L4, A40, A10, V100 and T4; its Blackwell architecture
# brief for B200; its Ada (table 2) and Ampere GA102 (table 3) white papers for GeForce and RTX A6000, bfloat16 with
# float32 accumulation.
_GPUS: Mapping[str, tuple[float | None, float | None, float]] = {
    "b200": (2250e12, 1125e12, 75e12),
    "h200 nvl": (835.5e12, 417.5e12, 60e12),
    "h200": (989.5e12, 494.5e12, 67e12),
    "h100 nvl": (835.5e12, 417.5e12, 60e12),
    "h100 pcie": (756e12, 378e12, 51e12),
    "h100": (989.5e12, 494.5e12, 67e12),
    "nvidia a100": (312e12, 156e12, 19.5e12),
    "l40s": (362e12, 183e12, 91.6e12),
    "l40": (181e12, 90.5e12, 90.5e12),
    "nvidia l4": (121e12, 60e12, 30.3e12),
    "rtx a6000": (154.8e12, 77.4e12, 38.7e12),
    "nvidia a40": (149.7e12, 74.8e12, 37.4e12),
    "nvidia a10g": (None, None, 31.5e12),
    "nvidia a10": (125e12, 62.5e12, 31.2e12),
    "rtx 4090": (165.2e12, 82.6e12, 82.6e12),
    "rtx 3090": (71e12, 35.6e12, 35.6e12),
    "v100": (None, None, 15.7e12),
    "tesla t4": (None, None, 8.1e12),
}


def gpu_peak(name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Peak operations a second of a GPU by the name that its driver gives it; None: not known.

    Args:
        name: e.g. "NVIDIA H100 80GB HBM3".
        dtype: what products are computed in: bfloat16 or float32.
        tf32: whether float32 products run on tensor cores (`torch.set_float32_matmul_precision`).
    """
    for part, (bfloat16, tensor_float32, float32) in _GPUS.items():
        if part in name.lower():
            peaks = {torch.bfloat16: bfloat16, torch.float32: tensor_float32 if tf32 else float32}
            return peaks.get(dtype)
    return None


def peak_flops_per_s(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak operations a second of a device; None where it is in no table (this one, `xla/slices.py`'s): a CPU, say."""
    if device.type == "cuda":
        tf32 = torch.get_float32_matmul_precision() != "highest"
        return gpu_peak(torch.cuda.get_device_name(device), dtype, tf32)
    if device.type == "xla" and os.environ.get("PJRT_DEVICE") == "TPU":
        return device_peak(os.environ.get("TPU_ACCELERATOR_TYPE") or os.environ.get("ACCELERATOR_TYPE") or "")
    return None


def utilization(
    tokens_per_s: float, flops_per_token: float, peak: float | None, n_devices: int = 1
) -> dict[str, float]:
    """`tflops_per_s` of all devices together and, where the peak is known, `mfu`: the share of it, 1 at most.

    Args:
        tokens_per_s: over all devices.
        flops_per_token: from the function of that name.
        peak: of one device.
        n_devices: how many share the work.
    """
    flops_per_s = tokens_per_s * flops_per_token
    known = {} if peak is None else {"mfu": flops_per_s / (peak * n_devices)}
    return {"tflops_per_s": flops_per_s / 1e12, **known}
