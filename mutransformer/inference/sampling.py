"""From logits to the next token: temperature, then top-k, then nucleus, then min-p. Read by `decoding.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from mutransformer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn; the filters apply in the order of their names here, each to what is left.

    Args:
        temperature: logits are divided by it; 0: always the likeliest token (the lowest id among equals).
        top_k: how many of the likeliest tokens are kept; 0: all.
        top_p: the likeliest tokens are kept until their probabilities, renormalized after top_k, come to this; the
            likeliest always; 1: all.
        min_p: tokens are kept that are at least this times as likely as the likeliest; 0: all.
    Raises:
        ConfigError: a value out of range.
    Source:
        nucleus: arXiv 1904.09751; min-p: arXiv 2407.01082; the order is that of transformers' generate.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, is_legal, rule, remedy in (
            ("temperature", 0 <= self.temperature < math.inf, "must be 0 or more", "use 1, or 0 for the likeliest"),
            ("top_k", self.top_k >= 0, "must be 0 or more", "use 40, or 0 for all"),
            ("top_p", 0 < self.top_p <= 1, "must lie above 0 and up to 1", "use 0.95, or temperature 0"),
            ("min_p", 0 <= self.min_p <= 1, "must lie in 0 to 1", "use 0.05, or 0 for all"),
        ):
            if not is_legal:
                raise ConfigError(name, getattr(self, name), rule, remedy)


def distribution(logits_BV: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """What the next token is drawn from, at a temperature above 0.

    Returns:
        weights_BV float32 or wider, in falling order, 0 for what is filtered out, not renormalized; and ids_BV, the
        token of each.
    """
    wide = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32))
    sorted_BV, ids_BV = wide.sort(dim=-1, descending=True, stable=True)
    # every filter keeps the first few of the falling order; the largest is taken off, as it may overflow when divided
    weights_BV = ((sorted_BV - sorted_BV[:, :1]) / sampling.temperature).softmax(-1)
    if sampling.top_k:
        weights_BV = weights_BV * (torch.arange(weights_BV.shape[1], device=weights_BV.device) < sampling.top_k)
    if sampling.top_p < 1:
        before_BV = weights_BV.cumsum(-1) - weights_BV
        weights_BV = weights_BV * (before_BV < sampling.top_p * weights_BV.sum(-1, keepdim=True))
    if sampling.min_p:
        weights_BV = weights_BV * (weights_BV >= sampling.min_p * weights_BV[:, :1])
    return weights_BV, ids_BV


def choose(logits_BV: torch.Tensor, sampling: Sampling, uniform_B: torch.Tensor) -> torch.Tensor:
    """The next token of each row.

    Args:
        logits_BV: of the next token.
        sampling: how to draw.
        uniform_B: a number in [0, 1) for each row, of which alone the draw depends; not read at temperature 0.
    Returns:
        token_B int64.
    """
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    weights_BV, ids_BV = distribution(logits_BV, sampling)
    up_to_BV = weights_BV.cumsum(-1)
    rank_B1 = (up_to_BV <= uniform_B[:, None] * up_to_BV[:, -1:]).sum(-1, keepdim=True)
    return ids_BV.gather(1, rank_B1.clamp(max=ids_BV.shape[1] - 1)).squeeze(1)
