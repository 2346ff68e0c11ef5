"""The same training on XLA devices as by plain torch, on every mesh."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import cases
import numpy as np
import on_devices
import pytest
import torch

MESHES = ((1, 1), (8, 1), (4, 2), (2, 4))
EVERYWHERE = ("dense", "unrolled", "gqa", "swiglu", "tied", "accumulated")
ON_ONE_MESH = tuple(variant for variant in cases.VARIANTS if variant not in EVERYWHERE)
RUNS = [(variant, mesh) for variant in EVERYWHERE for mesh in MESHES] + [(variant, (2, 4)) for variant in ON_ONE_MESH]
ORACLE = Path(__file__).parents[1] / "parity" / "data" / "oracle_a.npz"


@cache
def plain(variant, precision):
    return cases.train(None, variant, precision)


@cache
def on_mesh(variant, mesh):
    n_devices = mesh[0] * mesh[1]
    runs = [run for run in RUNS if (run[1] == (1, 1)) == (n_devices == 1)]
    return on_devices.run(n_devices, "train_all", runs=runs)[f"{variant} {list(mesh)}"]


def error(found, exact):
    """Largest difference of losses, and of weights."""
    of_weights = max((found["weights"][name] - exact["weights"][name]).abs().max() for name in exact["weights"])
    return (found["loss"] - exact["loss"]).abs().max().item(), of_weights.item()


@pytest.mark.parametrize("variant, mesh", RUNS, ids=str)
def test_losses_and_weights_are_as_far_from_float64_as_plain_torchs(variant, mesh):
    exact = plain(variant, "64-true")
    found, usual = error(on_mesh(variant, mesh), exact), error(plain(variant, "32-true"), exact)
    # another order of summation: up to a few times what plain float32 is off by, or a few ulps of a loss of 4
    assert found[0] <= max(4 * usual[0], 2e-6)
    assert found[1] <= max(4 * usual[1], 1e-6)


@pytest.mark.parametrize("variant, mesh", RUNS, ids=str)
def test_one_graph_and_no_operator_left_to_the_cpu(variant, mesh):
    result = on_mesh(variant, mesh)
    assert result["n_by_kind"] == {"training": 1}
    assert result["fallbacks"] == {}


def test_bfloat16_within_what_its_format_loses():
    (result,) = on_devices.run(8, "train_all", runs=[("dense", (4, 2))], precision="bf16-mixed").values()
    exact = plain("dense", "64-true")
    assert not torch.equal(result["loss"].float(), plain("dense", "32-true")["loss"].float())
    # one rounding to bfloat16 is off by 2^-9 of the value at most; logits, of size one, go through a few on their way
    assert torch.allclose(result["loss"].double(), exact["loss"].double(), rtol=0, atol=4 * 2**-9)
    assert all(tensor.dtype == torch.float32 for tensor in result["weights"].values())


def test_reference_trajectory():
    with np.load(ORACLE) as file:
        expected = {name: file[f"step/{ours}"] for name, ours in (("loss", "loss_avg"), ("grad_norm", "grad_norm"))}
    found = on_devices.run(8, "oracle", path=str(ORACLE), mesh=[4, 2])
    for name, values in expected.items():
        # the reference's own float32 is up to 2e-6 off its float64
        np.testing.assert_allclose(found[name].numpy(), values, rtol=0, atol=1e-5)
