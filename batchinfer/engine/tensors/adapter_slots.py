"""Assigns adapters to slots on the device, which may have fewer slots than there are adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from batchinfer.engine.schedule.step_plan import Longs

NO_ADAPTER = 0  # the number of rows without an adapter, and of an adapter that is merged into the weights


@dataclass(slots=True)
class AdapterSlots:
    """The slots of LoRA adapters on the device. If there are too few, the least recently used adapter is replaced.

    A slot is device memory for the weights of one adapter. Slots are numbered from 1. Steps must run on the device in
    the order of the calls of `of`.

    Attributes:
        numbers: The number of each adapter, from 1, by its fingerprint. 0 for "" and for an adapter that is merged
            into the model's weights.
        slots: The number of slots. None: each adapter has a slot with the number of the adapter.
        put: Copies an adapter to a slot; called with the numbers of the adapter and of the slot.
        moved: The number of copies of adapters to slots so far.
    """

    numbers: Mapping[str, int] = field(default_factory=dict)
    slots: int | None = None
    put: Callable[[int, int], object] = lambda number, slot: None
    _taken: dict[int, int] = field(default_factory=dict)  # number → slot, most recently used last
    moved: int = 0

    @property
    def any_name(self) -> str:
        """The fingerprint of one adapter that is not merged into the model's weights, or "" if there is none."""
        return next((name for name, number in self.numbers.items() if number), "")

    def of(self, names: tuple[str, ...]) -> Longs | None:
        """Return the slot of each row's adapter, after copying adapters to the device where needed.

        Args:
            names: The fingerprint of each row's adapter, "" for none.

        Returns:
            int64 [rows], 0 for no adapter. None if all are 0.

        Raises:
            KeyError: An adapter was not loaded.
            ValueError: The rows have more adapters than there are slots.
        """
        numbers = np.array([self.numbers[name] for name in names], np.int64)
        if not numbers.any():
            return None
        return numbers if self.slots is None else self._placed(numbers, self.slots)

    def _placed(self, numbers: Longs, slots: int) -> Longs:
        needed, back = np.unique(numbers, return_inverse=True)
        wanted = [number for number in needed.tolist() if number != NO_ADAPTER]
        if len(wanted) > slots:
            raise ValueError(
                f"the rows of a step have {len(wanted)} adapters, but the device has {slots} slots"
            )
        kept = {number: self._taken.pop(number) for number in wanted if number in self._taken}
        for number in wanted:
            if number not in kept:
                kept[number] = self._free(kept, slots)
                self.put(number, kept[number])
                self.moved += 1
        self._taken |= {number: kept[number] for number in wanted}
        return np.array([kept.get(number, NO_ADAPTER) for number in needed.tolist()], np.int64)[back]

    def _free(self, kept: Mapping[int, int], slots: int) -> int:
        if len(self._taken) + len(kept) < slots:
            empty: set[int] = {*range(1, slots + 1)} - {*self._taken.values(), *kept.values()}
            return min(empty)
        return self._taken.pop(next(iter(self._taken)))
