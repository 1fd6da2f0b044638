"""Parts of the tests, of about the same duration: `make test-all PART=2/8` runs the second of eight."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping

import pytest

PART = "BATCHINFER_TEST_PART"
# Duration of a case relative to the average
LONG = {
    "test_attention_aot.py": 8,
    "test_kills.py": 20,
    "test_latent_aot.py": 6,
    "test_lost_ranks.py": 30,
    "test_triton_engine.py": 10,
}


def leave_part(items: list[pytest.Item]) -> None:
    """Remove the items of other parts than the requested one. Raises UsageError."""
    asked = os.environ.get(PART)
    if not asked:
        return
    part, _, of = asked.partition("/")
    if not (part.isdecimal() and of.isdecimal() and 1 <= int(part) <= int(of)):
        raise pytest.UsageError(f"PART is {asked!r}; write i/n, as in 2/8")
    lengths = Counter[str]()
    for item in items:
        lengths[item.location[0]] += LONG.get(item.path.name, 1)
    kept = divided(lengths, int(of))[int(part) - 1]
    items[:] = [item for item in items if item.location[0] in kept]


def divided(lengths: Mapping[str, int], parts: int) -> list[set[str]]:
    """Assign each file, the longest first, to the shortest part so far."""
    made = [set[str]() for _ in range(parts)]
    taken = [0] * parts
    for file in sorted(lengths, key=lambda file: (-lengths[file], file)):
        shortest = taken.index(min(taken))
        made[shortest].add(file)
        taken[shortest] += lengths[file]
    return made
