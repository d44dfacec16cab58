"""Where the transformers engine keeps keys and values, and which prefixes it prefills together.

Shapes: _S slots, _B running rows (the first slots), _H heads, _W columns, _D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from apportion.engines.base import Request

# Keys and values of some rows, a layer of the model each.
Layers = Sequence[DynamicLayer]


class SlotLayer(DynamicLayer):
    """Keys and values of one layer, allocated once; each row is a continuation with a length of its own.

    Row b's tokens lie in columns 0 … length−1: padding is on the right, so that a slot can be handed to
    another prefix without touching its neighbours, and nothing is copied to make room for a token. Unused
    columns hold finite numbers, for the attention mask to multiply by 0.
    """

    rows_B: Tensor
    length_B: Tensor
    width: int

    def __init__(self, like: DynamicLayer, slots: int, width: int) -> None:
        super().__init__()
        assert like.keys is not None and like.values is not None
        self.keys, self.values = (t.new_zeros((slots, t.shape[1], width, t.shape[3])) for t in (like.keys, like.values))
        self.device, self.dtype, self.is_initialized = like.keys.device, like.keys.dtype, True

    def update(self, keys_BH1D: Tensor, values_BH1D: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Writes one token a row behind its last one; returns the (B, H, W, D) columns in use."""
        out = []
        for room_SHWD, new_BH1D in ((self.keys, keys_BH1D), (self.values, values_BH1D)):
            room_SHWD[self.rows_B, :, self.length_B] = new_BH1D[:, :, 0]
            out.append(room_SHWD[: len(self.rows_B), :, : self.width])
        return out[0], out[1]

    def get_seq_length(self) -> int:
        # The query counts as the last column: causality then allows all of them, and the mask decides alone.
        return self.width - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0


class SlotCache(Cache):
    """A `SlotLayer` for each layer of the model, made when the first prefix is placed."""

    def __init__(self, slots: int, width: int) -> None:
        super().__init__(layers=[])
        self.layers: list[SlotLayer] = []
        self.slots, self.width = slots, width

    def place(self, slots: Sequence[int], prefilled: Layers, row: int, length: int) -> None:
        """Gives these slots the first `length` tokens of one row of a prefilled cache."""
        self.layers = self.layers or [SlotLayer(layer, self.slots, self.width) for layer in prefilled]
        at = torch.tensor(slots)
        for layer, source in zip(self.layers, prefilled, strict=True):
            layer.keys[at, :, :length] = source.keys[row, :, :length]
            layer.values[at, :, :length] = source.values[row, :, :length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copies one slot's first `length` tokens to another."""
        for layer in self.layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def aim(self, length_B: Tensor, width: int) -> None:
        """Sets where the next forward of B rows writes, row b at `length_B[b]`, and the columns in use."""
        rows_B = torch.arange(len(length_B), device=length_B.device)
        for layer in self.layers:
            layer.rows_B, layer.length_B, layer.width = rows_B, length_B, width


def piece_of(cache: Cache, row: int, start: int, end: int) -> list[DynamicLayer]:
    """A copy of one row's keys and values, columns `start` to `end`."""
    piece = []
    for layer in cache.layers:
        part = DynamicLayer()
        part.keys, part.values = (t[row : row + 1, :, start:end].clone() for t in (layer.keys, layer.values))
        piece.append(part)
    return piece


@dataclass
class Trunk:
    """A prefix that is prefilled once, and the requests whose prefixes are its opening or all of it.

    `rollouts`: their continuations are responses of the batch, which may be continued in turn.
    """

    ids: tuple[int, ...]
    requests: list[Request] = field(default_factory=list)
    rollouts: bool = False

    @property
    def budget(self) -> int:
        return max(request.budget for request in self.requests)


def trunks_of(requests: Sequence[Request]) -> list[Trunk]:
    """Folds requests into trunks, a response's earlier pivots into its last one; longest budget first."""
    out: list[Trunk] = []
    # In falling lexicographic order a prefix follows directly after everything that extends it.
    for request in sorted(requests, key=lambda r: r.prefix_ids, reverse=True):
        if not out or out[-1].ids[: len(request.prefix_ids)] != request.prefix_ids:
            out.append(Trunk(request.prefix_ids))
        out[-1].requests.append(request)
    for trunk in out:
        trunk.requests.sort(key=lambda r: -r.budget)
    return sorted(out, key=lambda t: -t.budget)
