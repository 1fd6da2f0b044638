"""Tests the trie of continuations: each node runs once, and each token is scored after its prefix."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.continuations import Continuations, longest_sequence
from tests.examples import examples

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@settings(max_examples=examples(80, 2000), deadline=None, print_blob=True)
@given(context=TOKENS, each=st.lists(TOKENS, min_size=1, max_size=7))
def test_branches_score_each_token_once(context: list[int], each: list[list[int]]) -> None:
    prompt = np.array([*context, *chain(*each)], np.int32)
    lengths = [len(one) for one in each]
    parts = Continuations.of(prompt, lengths)
    found: dict[int, tuple[tuple[int, ...], int]] = {}
    run: list[tuple[int, ...]] = []
    for branch in parts.branches():
        tokens = branch.tokens.tolist()
        places = branch.positions(0, len(tokens)).tolist()
        run += [tuple(tokens[: place + 1]) for place in range(branch.first, len(tokens))]
        assert sorted(set(places)) == [*range(branch.first, len(tokens))]
        for place, target, slot in zip(places, branch.targets.tolist(), branch.slots.tolist(), strict=True):
            assert slot not in found
            found[slot] = tuple(tokens[: place + 1]), target
        for border in range(len(tokens) + 1):
            before, behind = branch.asked(0, border), branch.asked(border, len(tokens))
            assert (before.start, before.stop, behind.stop) == (0, behind.start, len(places))
            assert branch.positions(0, border).tolist() == places[before]
    longest = max(len(branch.tokens) for branch in parts.branches())
    assert longest == longest_sequence(len(prompt), lengths)
    assert len(run) == len(set(run)), "a node was run twice"
    wanted = [(tuple(context + one[:at]), one[at]) for one in each for at in range(len(one))]
    assert [found[slot] for slot in range(len(wanted))] == wanted
    assert set(run) == {before for before, _ in wanted}


@pytest.mark.parametrize("lengths", [(3,), (1, 0), (2, 2)])
def test_a_prompt_has_room_for_a_context_and_its_continuations(lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="all must be at least 1"):
        Continuations.of(np.array([1, 2, 3], np.int32), lengths)
