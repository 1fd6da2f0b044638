"""Assigns adapters to places on the device, which may have fewer places than there are adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from batchinfer.engine.schedule.step_plan import Longs

NO_ADAPTER = 0  # the number of rows without an adapter, and of an adapter that is merged into the weights


@dataclass(slots=True)
class AdapterPlaces:
    """The places of LoRA adapters on the device, with least-recently-used replacement.

    A place is device memory for the weights of one adapter. Places are numbered from 1. Steps must run on the device in
    the order in which they are passed to `of`.

    Attributes:
        numbers: The number of each adapter, from 1, by its fingerprint. 0 for "" and for an adapter that is merged into
            the model's weights.
        places: The number of places. None: there is a place for each adapter, with the adapter's number.
        put: Copies the adapter with a number to a place.
        moved: The number of adapters that were copied so far.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    places: int | None = None
    put: Callable[[int, int], object] = lambda number, place: None
    _taken: dict[int, int] = field(default_factory=dict)  # number → place, most recently used last
    moved: int = 0

    @property
    def any_name(self) -> str:
        """The fingerprint of any adapter that is not merged into the model's weights, or ""."""
        return next((name for name, number in self.numbers.items() if number), "")

    def of(self, names: tuple[str, ...]) -> Longs | None:
        """Return the place of each row's adapter, and copy adapters to the device where needed.

        Args:
            names: The fingerprint of each row's adapter, "" for none.

        Returns:
            int64 [rows], 0 for no adapter. None if all are 0.

        Raises:
            KeyError: An adapter was not loaded.
            ValueError: The rows have more adapters than there are places.
        """
        numbers = np.array([self.numbers[name] for name in names], np.int64)
        if not numbers.any():
            return None
        return numbers if self.places is None else self._placed(numbers, self.places)

    def _placed(self, numbers: Longs, places: int) -> Longs:
        needed, back = np.unique(numbers, return_inverse=True)
        wanted = [number for number in needed.tolist() if number != NO_ADAPTER]
        if len(wanted) > places:
            raise ValueError(
                f"the rows of a step have {len(wanted)} adapters, but the device has {places} places"
            )
        kept = {number: self._taken.pop(number) for number in wanted if number in self._taken}
        for number in wanted:
            if number not in kept:
                kept[number] = self._free(kept, places)
                self.put(number, kept[number])
                self.moved += 1
        self._taken |= {number: kept[number] for number in wanted}
        return np.array([kept.get(number, NO_ADAPTER) for number in needed.tolist()], np.int64)[back]

    def _free(self, kept: Mapping[int, int], places: int) -> int:
        """Return an empty place, or the place of the least recently used adapter that the step does not need.

        Args:
            kept: The adapters that the step needs, as number and place.
            places: The number of places.
        """
        if len(self._taken) + len(kept) < places:
            empty: set[int] = {*range(1, places + 1)} - {*self._taken.values(), *kept.values()}
            return min(empty)
        return self._taken.pop(next(iter(self._taken)))
