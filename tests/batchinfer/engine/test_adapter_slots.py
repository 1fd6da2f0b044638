"""The adapter slots of a device that has room for some of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.tensors.adapter_slots import AdapterSlots

NAMES = ("", *"abcdefg")
NUMBERS = {name: number for number, name in enumerate(NAMES)}


@given(
    places=st.integers(1, 4),
    steps=st.lists(st.lists(st.sampled_from(NAMES), min_size=1, max_size=6), max_size=30),
)
def test_each_row_finds_its_adapter_and_none_is_moved_for_nothing(
    places: int, steps: list[list[str]]
) -> None:
    stand: dict[int, int] = {}
    put = [0]

    def placed(number: int, place: int) -> None:
        assert 1 <= place <= places
        stand[place] = number
        put[0] += 1

    found, recent = AdapterSlots(NUMBERS, places, placed), list[str]()
    for names in steps:
        needed = {*names} - {""}
        if len(needed) > places:
            with pytest.raises(
                ValueError, match=f"have {len(needed)} adapters, but the device has {places} slots"
            ):
                found.of(tuple(names))
            continue
        before = put[0]
        rows = found.of(tuple(names))
        if rows is None:
            assert not needed
            continue
        assert [stand.get(int(row), 0) for row in rows] == [NUMBERS[name] for name in names]
        # The last ones that were needed are still there
        assert put[0] - before == len(needed - {*recent[-places:]})
        recent = [name for name in recent if name not in needed] + sorted(needed)
    assert found.moved == put[0]


def test_with_a_slot_for_each_adapter_its_number_is_its_slot() -> None:
    found = AdapterSlots(NUMBERS)
    rows = found.of(("b", "", "a"))
    assert rows is not None
    assert (rows.tolist(), found.any_name, found.moved) == ([2, 0, 1], "a", 0)
    assert found.of(("", "")) is None
    with pytest.raises(KeyError):
        found.of(("z",))
    assert AdapterSlots().any_name == ""
