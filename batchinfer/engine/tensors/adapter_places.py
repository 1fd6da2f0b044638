"""Where the adapters of a step's rows stand on the device, which may have room for some of them only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from batchinfer.engine.schedule.step_plan import Longs

NO_ADAPTER = 0  # the number of rows without one, and of one that is merged into the weights


@dataclass(slots=True)
class AdapterPlaces:
    """The places of adapters, from 1 on. An adapter that a step needs, and that has none, takes that of the one which
    no step has needed for longest: steps run on the device in the order in which they are given here."""

    numbers: Mapping[str, int] = field(default_factory=dict)  # by fingerprint, from 1 on; that of "" is 0
    places: int | None = None  # how many there are; None: each adapter has one, which is its number
    # Puts the adapter of a number into a place
    put: Callable[[int, int], object] = lambda number, place: None
    # Number → place, the one that was needed last at the end
    _taken: dict[int, int] = field(default_factory=dict)
    moved: int = 0  # how many were put into a place so far

    @property
    def any_name(self) -> str:
        """The name of an adapter that stands beside the weights; "" if there is none."""
        return next((name for name, number in self.numbers.items() if number), "")

    def of(self, names: tuple[str, ...]) -> Longs | None:
        """Return the place of each row's adapter, 0 for none; None where all are 0. Raises KeyError for an adapter that
        the model was not given, and ValueError for more of them than there are places."""
        numbers = np.array([self.numbers[name] for name in names], np.int64)
        if not numbers.any():
            return None
        return numbers if self.places is None else self._placed(numbers, self.places)

    def _placed(self, numbers: Longs, places: int) -> Longs:
        needed, back = np.unique(numbers, return_inverse=True)
        wanted = [number for number in needed.tolist() if number != NO_ADAPTER]
        if len(wanted) > places:
            raise ValueError(f"rows of a step have {len(wanted)} adapters, and {places} are on the device")
        kept = {number: self._taken.pop(number) for number in wanted if number in self._taken}
        for number in wanted:
            if number not in kept:
                kept[number] = self._free(kept, places)
                self.put(number, kept[number])
                self.moved += 1
        self._taken |= {number: kept[number] for number in wanted}
        return np.array([kept.get(number, NO_ADAPTER) for number in needed.tolist()], np.int64)[back]

    def _free(self, kept: Mapping[int, int], places: int) -> int:
        """Return a place that no row of this step needs: an empty one, or that of the adapter that waited longest."""
        if len(self._taken) + len(kept) < places:
            empty: set[int] = {*range(1, places + 1)} - {*self._taken.values(), *kept.values()}
            return min(empty)
        return self._taken.pop(next(iter(self._taken)))
