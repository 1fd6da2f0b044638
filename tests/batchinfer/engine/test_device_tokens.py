"""Tokens that only the device knows: each sequence gets its own, whatever the order of the next step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.runner.sampled import DeviceTokens
from batchinfer.engine.schedule.places import places_of
from batchinfer.engine.schedule.sampling_writer import awaited_from
from tests.batchinfer.engine.driver import sequence

CPU = torch.device("cpu")
SEQUENCES = [sequence([1, 2], 3, key) for key in range(12)]
ONE, TWO, THREE = SEQUENCES[:3]


@pytest.mark.parametrize(
    ("asked", "tokens"),
    [([ONE, TWO, THREE], [7, 0, 9]), ([THREE, ONE], [9, 7]), ([ONE, THREE], [7, 9]), ([TWO], [0])],
)
def test_each_gets_the_token_that_was_sampled_for_it(asked, tokens):
    """0 where none was: what the sequence runs on with is dropped."""
    device_tokens = DeviceTokens(torch.tensor([7, -1, 9]))
    assert device_tokens.of(awaited_from(asked, [ONE, TWO, THREE]), CPU).tolist() == tokens
    assert device_tokens.of(None, CPU).tolist() == [7, 0, 9]


def test_a_sequence_that_the_step_did_not_run_is_an_error():
    with pytest.raises(AssertionError, match="did not run the sequence"):
        awaited_from([TWO], [ONE])


@given(st.data())
def test_each_is_found_where_it_was(data):
    """As a dict would find them, whatever changed."""
    before = data.draw(st.lists(st.sampled_from(SEQUENCES), unique_by=id))
    stay = [s for s in before if data.draw(st.booleans())]
    new = [s for s in SEQUENCES if s not in before and data.draw(st.booleans())]
    now = [*stay, *new]
    if data.draw(st.booleans()):
        now = data.draw(st.permutations(now))
    assert places_of(now, before) == [before.index(s) if s in before else -1 for s in now]
