"""Inputs of stored weights are cut where scales and words end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.errors import CannotSplit
from batchinfer.models.formats.packed_tensor import cut_inputs


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.data())
def test_each_input_keeps_its_scale_and_its_word(
    group: int, held: int, units: int, data: st.DataObject
) -> None:
    """Or nothing is cut: exactly where a group of several, or a word, would be divided."""
    count = group * held * units
    first, end = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    one = units * held == 1
    whole = (first, end) == (0, count)
    divided = any(at % held or (at % group and not one) for at in (first, end))
    if divided and not whole:
        with pytest.raises(CannotSplit):
            cut_inputs((first, end), count, group, held)
        return
    cut = cut_inputs((first, end), count, group, held)
    assert cut.group == (end - first if one else group)
    scales, words = [*range(count // group)][cut.groups], [*range(count // held)][cut.words]
    for number, at in enumerate(range(first, end)):
        assert scales[number // cut.group] == at // group
        assert words[number // held] == at // held
