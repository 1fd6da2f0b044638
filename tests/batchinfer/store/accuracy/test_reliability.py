"""Reliability figures are what NumPy makes of all probabilities at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.store.accuracy.reliability import BINS, Reliability
from tests.examples import examples

ANSWERS = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60)


@settings(max_examples=examples(100, 2000), deadline=None, print_blob=True)
@given(answers=ANSWERS)
def test_it_is_that_of_all_answers_at_once(answers: list[tuple[float, bool]]) -> None:
    found = Reliability()
    for one in answers:
        found.add(*one)
    p, right = (np.array(values, np.float64) for values in zip(*answers, strict=True))
    which = np.minimum((p * BINS).astype(int), BINS - 1)
    error = 0.0
    for at in range(BINS):
        here = which == at
        assert (found.bins[at].rows, found.bins[at].right) == (here.sum(), right[here].sum())
        if here.any():
            error += here.sum() / len(p) * abs(p[here].mean() - right[here].mean())
    assert found.rows == len(answers)
    assert found.expected_error == pytest.approx(error, abs=1e-9)
    assert found.brier_score == pytest.approx(((p - right) ** 2).mean(), abs=1e-9)
    assert found.mean_probability == pytest.approx(p.mean(), abs=1e-9)


def test_nothing_is_said_of_no_answers() -> None:
    found = Reliability()
    assert (found.rows, found.mean_probability, found.expected_error, found.brier_score) == (
        0,
        None,
        None,
        None,
    )
