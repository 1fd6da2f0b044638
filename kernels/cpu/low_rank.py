"""The packed factors of adapters, and the buffers of their products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchinfer_kernels.cpu.packed_weights import PackedWeight
from batchinfer_kernels.cpu.structures import AdaptedStructure, LowRankStructure, Weight, address
from batchinfer_kernels.low_rank import AdaptedRows

_ROW = 64  # at least the columns of a panel


class PackedLowRank:
    """The packed LoRA factors A and B of all adapters for one linear layer.

    Products use only adapters that have a place. With fewer places than adapters, `place` selects the adapters.

    Args:
        factors: A and B of each adapter; None for an adapter that does not change the layer.
        outputs: number of outputs of the layer.
        inputs: number of inputs of the layer.
        places: number of adapters that products can use at a time. None: all of them; each has its own place.
    """

    def __init__(
        self,
        factors: Sequence[tuple[PackedWeight, PackedWeight] | None],
        outputs: int,
        inputs: int,
        places: int | None = None,
    ) -> None:
        self.count, self.outputs, self.inputs = places or len(factors), outputs, inputs
        self.most_rank = max((own[0].outputs for own in factors if own is not None), default=1)
        self._kept = factors
        self.dtype = next((own[0].dtype for own in factors if own is not None), None)
        self._halves = [(Weight * self.count)() for _ in range(2)]
        for number in range(1, 1 + (self.count if places is None else 0)):
            self.place(number, number)
        self.structure = LowRankStructure(*self._halves, self.count, outputs, self.most_rank)

    def place(self, number: int, place: int) -> None:
        """Assign an adapter to a place: products of rows with this place use the adapter. Copies no factors.

        Args:
            number: number of the adapter, from 1.
            place: number of the place, from 1.
        """
        own = self._kept[number - 1]
        for at, half in enumerate(self._halves):
            half[place - 1] = Weight() if own is None else own[at].structure


def check_adapted_rows(rows: AdaptedRows, tokens: int) -> None:
    """Raise ValueError unless the tensors of `rows` have the dtype and shapes that the C operators read.

    Args:
        rows: the tokens of the step, sorted by adapter.
        tokens: number of tokens of the step.
    """
    parts = rows.order, rows.places, rows.starts
    whole = all(part.dtype == torch.int64 and part.dim() == 1 and part.is_contiguous() for part in parts)
    if not whole or len(rows.places) != tokens or len(rows.starts) < 2 or int(rows.starts[-1]) != tokens:
        shapes = [tuple(part.shape) for part in parts]
        raise ValueError(f"order, places and starts of adapters are {shapes}, for {tokens} tokens")


def count_without_adapter(rows: AdaptedRows) -> int:
    """Return the number of tokens without an adapter."""
    return int(rows.starts[1])


class AdaptedRoom:
    """The buffers for the LoRA products of the tokens that have an adapter, which the layers of a step share.

    Args:
        rows: the tokens of the step, sorted by adapter.
        dtype: dtype of the activations.
        inputs: maximum number of inputs of a product.
        rank: maximum rank of an adapter.
        outputs: maximum number of outputs of a product.
    """

    def __init__(self, rows: AdaptedRows, dtype: torch.dtype, inputs: int, rank: int, outputs: int) -> None:
        count = len(rows.order) - count_without_adapter(rows)
        self.rows, self.count = rows, count
        # Padded, because adding the last row reads up to one panel beyond it
        self.values = torch.empty(count * outputs + _ROW)
        self._room = torch.empty(count, inputs, dtype=dtype), torch.empty(count, rank, dtype=dtype)
        given = (rows.order, rows.places, rows.starts)
        self.structure = AdaptedStructure(*map(address, (*given, *self._room, self.values)))


def with_added_values(weight: Weight, values: Tensor, rows: AdaptedRows) -> Weight:
    """Return a copy of a weight's C structure whose product also adds LoRA products.

    Args:
        weight: the C structure of the weight.
        values: (n, outputs) float32, the LoRA products of the n tokens that have an adapter, sorted by adapter.
        rows: the tokens of the step, sorted by adapter.
    """
    found = Weight.from_buffer_copy(weight)
    found.added, found.added_places = address(values), address(rows.places)
    found.added_first = count_without_adapter(rows)
    return found
