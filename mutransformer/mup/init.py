"""Initialization: every weight is drawn here, from the plan's rows and a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from mutransformer.mup.plan import Plan


def generator_for(name: str, seed: int) -> torch.Generator:
    """A CPU generator that depends on the tensor's name and the seed alone, not on device, mesh or other tensors."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def initialize(parameters: Mapping[str, torch.Tensor], plan: Plan, seed: int) -> None:
    """Fills `parameters` in place: Gaussian with the row's mean and standard deviation.

    Args:
        parameters: name -> tensor of the row's shape, on any device, any floating dtype (drawn in float32).
        plan: the rows; every parameter must have one.
        seed: same seed, same weights, whatever the device.
    Raises:
        UnclaimedParameterError: names and rows differ.
    """
    rows = plan.by_name(parameters)
    for name, parameter in parameters.items():
        row = rows[name]
        if row.init_std == 0:
            parameter.fill_(row.init_mean)
        else:
            values = torch.empty(row.shape, dtype=torch.float32)
            parameter.copy_(values.normal_(row.init_mean, row.init_std, generator=generator_for(name, seed)))
