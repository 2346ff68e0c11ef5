"""Keys and values of tokens seen before, so that a decoder reads each token once. Read by `decoder.py`."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from mutransformer.model.config import DecoderConfig


@dataclass
class LayerCache:
    """One layer's part of a `Cache`, for the tokens being read.

    Args:
        keys_BGMK: rotated keys, a slot a position; written in place.
        values_BGMK: values, likewise.
        slots_BL: slot of each token being read.
    """

    keys_BGMK: torch.Tensor
    values_BGMK: torch.Tensor
    slots_BL: torch.Tensor

    def extend(self, k_BGLK: torch.Tensor, v_BGLK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the new tokens' keys and values; returns all slots: keys_BGMK, values_BGMK."""
        index_BGLK = self.slots_BL[:, None, :, None].expand_as(k_BGLK)
        return self.keys_BGMK.scatter_(2, index_BGLK, k_BGLK), self.values_BGMK.scatter_(2, index_BGLK, v_BGLK)


class Cache:
    """The last `sequence_len` tokens of each row, in memory whose shape never changes: one compilation on XLA.

    A token attends to itself and to the `sequence_len` tokens before it, however many were read. A row's first tokens
    may be padding, so that rows of different lengths end together: their positions are negative and nobody sees them.
    Without gradients alone: it is written in place.

    Args:
        config: shape of the decoder.
        n_row: B, sequences side by side.
        chunk: most tokens that are read at once, from 1 up.
        n_padding: padding tokens before each row's first token; None: none.
        dtype: of keys and values, the decoder's compute dtype.
        device: where the decoder is.
    Attributes:
        next_position_B: position of the next token of each row, int64.
    Shapes:
        keys, values: [N, B, G, sequence_len + chunk, K]; so what a chunk overwrites is out of sight of its first token
    """

    def __init__(
        self,
        config: DecoderConfig,
        n_row: int,
        *,
        chunk: int = 1,
        n_padding: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.window = config.sequence_len
        self.chunk = chunk
        self.n_slot = config.sequence_len + chunk
        shape = (config.n_layer, n_row, config.n_kv_head_, self.n_slot, config.d_head)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        start = torch.zeros(n_row, dtype=torch.int64) if n_padding is None else -n_padding
        self.next_position_B = start.to(device)

    def advance(self, length: int) -> tuple[torch.Tensor, torch.Tensor, list[LayerCache]]:
        """Makes room for the next `length` tokens of each row.

        Returns:
            Their positions_BL; visible_BHLM, which slots each of them sees (one head for all); a LayerCache a layer.
        """
        assert length <= self.chunk, f"{length} tokens at once into a cache made for {self.chunk}"
        device = self.next_position_B.device
        positions_BL = self.next_position_B[:, None] + torch.arange(length, device=device)
        self.next_position_B = self.next_position_B + length
        # what each slot holds once these are written: of the positions that share the slot, the last that was read
        newest_B1 = positions_BL[:, -1:]
        held_BM = newest_B1 - (newest_B1 - torch.arange(self.n_slot, device=device)) % self.n_slot
        distance_BLM = positions_BL[:, :, None] - held_BM[:, None, :]
        visible_BLM = (distance_BLM >= 0) & (distance_BLM <= self.window) & (held_BM >= 0)[:, None, :]
        visible_BLM |= distance_BLM == 0  # padding sees itself: a row without a weight would not be a number
        slots_BL = positions_BL % self.n_slot
        layers = [LayerCache(keys, values, slots_BL) for keys, values in zip(self.keys, self.values, strict=True)]
        return positions_BL, visible_BLM.unsqueeze(1), layers

    def take(self, rows_R: torch.Tensor) -> Cache:
        """A cache of these rows, which may repeat; this one stays as it is."""
        other = copy.copy(self)
        other.keys, other.values = (tensor.index_select(1, rows_R) for tensor in (self.keys, self.values))
        other.next_position_B = self.next_position_B[rows_R]
        return other
