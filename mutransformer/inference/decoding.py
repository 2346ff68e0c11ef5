"""Decoding with a cache: prompts of different lengths are read side by side, then all rows go on token by token.

All shapes are the same whatever the prompts' lengths and however long it goes on. XLA compiles one graph for reading
prompts, one for a step, and two small ones for the empty cache and the last step.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mutransformer.inference.sampling import Sampling, choose
from mutransformer.model.cache import Cache
from mutransformer.model.decoder import Decoder

CHUNK = 64  # tokens of a prompt that are read at once


@dataclass(frozen=True)
class Event:
    """A token of a row.

    Args:
        row: number of the sequence.
        token: the next token; the stop token ends a row and is no part of its text.
        is_last: whether the row ends here, by the stop token or by its length.
    """

    row: int
    token: int
    is_last: bool


class Draws:
    """Random generators for sequences: each depends on the seed, its prompt and how often that came before, alone.

    Args:
        seed: any number.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._n_before: Counter[tuple[int, ...]] = Counter()

    def generator(self, prompt: Sequence[int]) -> torch.Generator:
        """A CPU generator for the next sequence of this prompt."""
        key = tuple(prompt)
        digest = hashlib.sha256(repr((self._seed, self._n_before[key], key)).encode()).digest()
        self._n_before[key] += 1
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def read_prompts(
    decoder: Decoder, prompts: Sequence[Sequence[int]], sync: Callable[[], None] = lambda: None
) -> tuple[torch.Tensor, Cache]:
    """Reads prompts of any lengths, each of at least one token.

    Args:
        decoder: with its weights, on any device.
        prompts: token ids.
        sync: as for `generate`.
    Returns:
        logits_BV after the last token of each, and the cache that holds them all.
    """
    embedding = decoder.get_parameter("embedding")
    n_column = -(-max(map(len, prompts)) // CHUNK) * CHUNK
    tokens_BL = torch.zeros(len(prompts), n_column, dtype=torch.int64)
    for row, prompt in zip(tokens_BL, prompts, strict=True):
        row[n_column - len(prompt) :] = torch.tensor(prompt)
    cache = Cache(
        decoder.config,
        len(prompts),
        chunk=CHUNK,
        n_padding=n_column - torch.tensor([len(prompt) for prompt in prompts]),
        dtype=decoder.compute_dtype or embedding.dtype,
        device=embedding.device,
    )
    logits_BV = torch.empty(0)
    sync()  # an empty cache is data like any other, and not a constant of the first chunk's graph
    for part_BL in tokens_BL.split(CHUNK, dim=1):
        logits_BV = decoder(part_BL.to(embedding.device), cache=cache)[:, -1]
        sync()
    return logits_BV, cache


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    generators: Sequence[torch.Generator],
    *,
    max_tokens: int,
    stop_token: int | None = None,
    n_id: int | None = None,
    sync: Callable[[], None] = lambda: None,
) -> Iterator[Event]:
    """Goes on with each prompt until the stop token or `max_tokens`; a row's tokens do not depend on other rows.

    (To rounding: a matrix product of more rows may add in another order.)

    Args:
        decoder: with its weights, on any device.
        prompts: token ids, at least one each; prompts that are equal are read once.
        sampling: how to draw.
        generators: from `Draws`, one a prompt.
        max_tokens: most tokens of a row, the stop token counted.
        stop_token: ends a row; None: none does.
        n_id: ids from here up, which pad the vocabulary, are never drawn; None: there are none.
        sync: called after each step is sent and before its tokens are read: torch_xla.sync on XLA.
    Yields:
        Events, step by step, rows in order; none of a row after its last.
    """
    distinct = {tuple(prompt): None for prompt in prompts}
    numbers = {prompt: i for i, prompt in enumerate(distinct)}
    device = decoder.get_parameter("embedding").device
    logits_BV, cache = read_prompts(decoder, list(distinct), sync)
    if len(distinct) < len(prompts):
        rows = torch.tensor([numbers[tuple(prompt)] for prompt in prompts], device=device)
        logits_BV, cache = logits_BV[rows], cache.take(rows)
    going = set(range(len(prompts)))
    for i in range(max_tokens):
        uniform_B = torch.stack([torch.rand((), generator=generator) for generator in generators]).to(device)
        token_B = choose(logits_BV[:, :n_id], sampling, uniform_B)
        if i + 1 < max_tokens:  # sent before the tokens are read
            logits_BV = decoder(token_B[:, None], cache=cache)[:, -1]
        sync()
        for row, token in enumerate(token_B.tolist()):
            if row in going:
                is_last = token == stop_token or i + 1 == max_tokens
                going -= {row} if is_last else set()
                yield Event(row, token, is_last)
        if not going:
            return
