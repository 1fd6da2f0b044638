"""Finds where sequences stand in another list."""

from __future__ import annotations

from itertools import repeat

from batchinfer.engine.schedule.sequence import Sequence


def places_of(wanted: list[Sequence], among: list[Sequence]) -> list[int]:
    """The place of each in `among`, -1 where it is not there."""
    places = dict(zip(among, range(len(among)), strict=True))
    # Without a loop: a row ends with nearly every step of a full batch
    return list(map(places.get, wanted, repeat(-1)))
