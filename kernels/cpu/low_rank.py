"""The factors of adapters in the layout of the compiled operators, and the room that products with them work in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchinfer_kernels.cpu.packed import PackedWeight
from batchinfer_kernels.cpu.structures import AdaptedStructure, LowRankStructure, Weight, address

_ROW = 64  # floats: more than a panel has columns


class PackedLowRank:
    """The factors of all adapters for one product: A and B of each; None for one that adds nothing."""

    def __init__(
        self, factors: Sequence[tuple[PackedWeight, PackedWeight] | None], outputs: int, inputs: int
    ) -> None:
        self.count, self.outputs, self.inputs = len(factors), outputs, inputs
        self.most_rank = max((own[0].outputs for own in factors if own is not None), default=1)
        self._kept = factors
        self.dtype = next((own[0].dtype for own in factors if own is not None), None)
        halves = [(Weight * self.count)() for _ in range(2)]
        for at, own in enumerate(factors):
            for half, weight in zip(halves, own or (), strict=False):
                half[at] = weight.structure
        self.structure = LowRankStructure(*halves, self.count, outputs, self.most_rank)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedTokens:
    """A step's tokens sorted by their adapter: `order` and `places` (T,) int64, `starts` (adapters + 2,) int64; those
    without one come first."""

    order: Tensor
    places: Tensor
    starts: Tensor

    def __post_init__(self) -> None:
        tokens = len(self.order)
        whole = all(
            part.dtype == torch.int64 and part.dim() == 1 for part in (self.order, self.places, self.starts)
        )
        if not whole or len(self.places) != tokens or len(self.starts) < 2 or int(self.starts[-1]) != tokens:
            shapes = [tuple(part.shape) for part in (self.order, self.places, self.starts)]
            raise ValueError(
                f"order, places and starts of adapters are {shapes}, to the token {self.starts[-1:]}"
            )

    @property
    def first(self) -> int:
        """Return how many tokens have no adapter."""
        return int(self.starts[1])


class AdaptedRoom:
    """The room for the tokens that have an adapter, in products of up to so many inputs, ranks and outputs."""

    def __init__(
        self, tokens: AdaptedTokens, dtype: torch.dtype, inputs: int, rank: int, outputs: int
    ) -> None:
        rows = len(tokens.order) - tokens.first
        self.tokens, self.rows = tokens, rows
        self.values = torch.empty(
            rows * outputs + _ROW
        )  # who adds the last row reads a panel's width beyond it
        self._room = torch.empty(rows, inputs, dtype=dtype), torch.empty(rows, rank, dtype=dtype)
        given = (tokens.order, tokens.places, tokens.starts)
        self.structure = AdaptedStructure(*map(address, (*given, *self._room, self.values)))


def add_to(weight: Weight, values: Tensor, tokens: AdaptedTokens) -> Weight:
    """Return the weight whose results get the values that low-rank products made for these tokens."""
    found = Weight.from_buffer_copy(weight)
    found.added, found.added_places = address(values), address(tokens.places)
    found.added_first = tokens.first
    return found
