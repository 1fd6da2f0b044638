"""How many keys are kept of a row."""

from __future__ import annotations

from typing import NamedTuple


class RecordShape(NamedTuple):
    """How many keys a row has: one for each of its attempts, or one for each of its `samples`, all of the first
    attempt."""

    attempts: int = 1
    samples: int = 1
