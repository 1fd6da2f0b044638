from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.wording import shown, size, sizes


@pytest.mark.parametrize(("value", "shown"), [
    (0, "0 bytes"),
    (1, "1 byte"),
    (1024, "1 KiB"),
    (1536, "1.50 KiB"),
    (2**20 - 1, "1.00 MiB"),
    (int(1.25 * 2**30), "1.25 GiB"),
    (274e9, "255 GiB"),
    (3 * 2**60, "3,072 PiB"),
])  # fmt: skip
def test_three_digits_in_the_unit_that_fits(value: float, shown: str) -> None:
    assert size(value) == shown


def test_two_sizes_have_the_digits_that_tell_them_apart() -> None:
    assert sizes(2**30, 2**20) == ("1 GiB", "1 MiB")
    assert sizes(1_073_800_000, 1_073_700_000) == ("1.0001 GiB", "1.0000 GiB")
    assert sizes(10**15 + 1, 10**15) == ("1,000,000,000,000,001 bytes", "1,000,000,000,000,000 bytes")
    assert sizes(7, 7) == ("7 bytes", "7 bytes")


@given(st.integers(0, 2**62), st.integers(0, 2**62))
def test_two_different_sizes_never_look_alike(one: int, other: int) -> None:
    shown = sizes(one, other)
    assert (shown[0] == shown[1]) == (one == other)


@pytest.mark.parametrize(("value", "unit", "text"), [
    (180e9, "FLOP/s", "180 GFLOP/s"),
    (33.4e9, "bytes/s", "33.4 GB/s"),
    (790e12, "FLOP/s", "790 TFLOP/s"),
    (0.25, "J/token", "0.25 J/token"),
    (27_300.0, "tokens/s", "27.3k tokens/s"),
    (2452, "rows", "2,452"),
    (0.05, "0…1", "5.0%"),
    (0.0004, "0…1", "< 0.1%"),
    (-0.0004, "0…1", "> −0.1%"),
    (-0.018, "0…1", "−1.8%"),
    (0.0, "0…1", "0%"),
    (-2.0, "s", "−2 s"),
    (True, "", "yes"),
    (1 << 30, "bytes", "1 GiB"),
])  # fmt: skip
def test_values_as_people_read_them(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text
