"""The engine's cache of compiled grammars."""

from __future__ import annotations

from typing import Any, cast

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.grammar_cache import GRAMMAR_BYTES, GrammarCache, estimated_bytes


def small(number: int) -> SamplingParams:
    return SamplingParams(regex=f"{number}")


def made(number: int) -> Any:
    """Return a stand-in for a compiled grammar."""
    return cast(Any, number)


def test_those_that_were_used_last_are_kept_up_to_a_number_of_bytes() -> None:
    kept = GrammarCache(most=4 * GRAMMAR_BYTES)
    for number in range(3):
        kept.add(small(number), made(number))
    assert kept.find(small(0)) == 0
    for number in range(3, 5):
        kept.add(small(number), made(number))
    assert {number for number in range(5) if kept.find(small(number)) is not None} == {0, 3, 4}
    assert kept.bytes == sum(estimated_bytes(small(number)) for number in (0, 3, 4)) <= 4 * GRAMMAR_BYTES


def test_a_large_grammar_evicts_all_others() -> None:
    kept = GrammarCache(most=4 * GRAMMAR_BYTES)
    large = SamplingParams(grammar="x" * (1 << 18))
    for number in range(3):
        kept.add(small(number), made(number))
    kept.add(large, made(9))
    assert len(kept) == 1
    assert kept.find(large) == 9
    kept.add(small(1), made(1))
    assert kept.bytes == estimated_bytes(small(1))
