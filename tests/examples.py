"""How many examples a property is tried with: few in each run of the tests, many where everything is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

EVERYTHING = "BATCHINFER_TEST_EVERYTHING"  # set by `make test-all`


def examples(few: int, many: int) -> int:
    """For `max_examples` of a property whose examples take long."""
    return many if everything() else few


def first_of(values: Iterable[Any], few: int) -> list[Any]:
    """For `parametrize`: the first few values belong to every run of the tests, the others to the slow sweep."""
    cases = (one if isinstance(one, tuple) else (one,) for one in values)
    return [pytest.param(*case, marks=[pytest.mark.slow] * (at >= few)) for at, case in enumerate(cases)]


def everything() -> bool:
    """Whether all is asked for that takes long."""
    return bool(os.environ.get(EVERYTHING))
