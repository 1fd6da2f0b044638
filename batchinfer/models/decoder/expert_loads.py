"""How many tokens each expert was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from batchinfer.core.samples import ExpertTokens


class ExpertLoads:
    """The counters of a decoder's layers, (experts,) int64 each, where the device counts in place: a step waits for
    none of them."""

    def __init__(self, layers: Mapping[int, Tensor]) -> None:
        self._layers = layers

    def numbered_from(self, first: int) -> ExpertLoads:
        """Return the same counters of a stage's layers, by their numbers in the whole model."""
        return ExpertLoads({first + index: loads for index, loads in self._layers.items()})

    def read(self) -> ExpertTokens:
        """Layer → tokens of each expert since the last restart. Waits for the device."""
        return {index: loads.tolist() for index, loads in self._layers.items()}

    def restart(self) -> None:
        """Count from 0."""
        for loads in self._layers.values():
            loads.zero_()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing that runs inside."""
        kept = {index: loads.clone() for index, loads in self._layers.items()}
        try:
            yield
        finally:
            for index, loads in self._layers.items():
                loads.copy_(kept[index])
