"""Sequences of a step among those of the step before: as a dict would find them, whatever changed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.tensors.places import places_of
from tests.batchinfer.engine.driver import sequence

SEQUENCES = [sequence([1, 2], 3, key) for key in range(12)]


@given(st.data())
def test_each_is_found_where_it_was(data):
    before = data.draw(st.lists(st.sampled_from(SEQUENCES), unique_by=id))
    stay = [s for s in before if data.draw(st.booleans())]
    new = [s for s in SEQUENCES if s not in before and data.draw(st.booleans())]
    now = [*stay, *new]
    if data.draw(st.booleans()):
        now = data.draw(st.permutations(now))
    assert places_of(now, before) == [before.index(s) if s in before else -1 for s in now]
