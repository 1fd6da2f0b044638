"""How many examples a property is tried with: few in each run of the tests, many where everything is asked for."""

from __future__ import annotations

import os

EVERYTHING = "BATCHINFER_TEST_EVERYTHING"  # set by `make test-all`


def examples(few: int, many: int) -> int:
    """For `max_examples` of a property whose examples take long."""
    return many if everything() else few


def everything() -> bool:
    """Whether all is asked for that takes long."""
    return bool(os.environ.get(EVERYTHING))
