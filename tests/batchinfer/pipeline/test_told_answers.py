"""Engines receive answers of an earlier result."""

from __future__ import annotations

import pickle

import numpy as np

from batchinfer.pipeline.plans.earlier_drafts import _all_below
from batchinfer.pipeline.workers.messages import Learn


def test_answers_are_truncated_before_the_first_token_that_the_model_does_not_have() -> None:
    answers = [[1, 2, 3], [], [9, 1], [4, 7, 2], [7], [5]]
    assert [one.tolist() for one in _all_below(answers, 10)] == [[1, 2, 3], [9, 1], [4, 7, 2], [7], [5]]
    assert [one.tolist() for one in _all_below(answers, 7)] == [[1, 2, 3], [4], [5]]
    assert _all_below([], 7) == [] == _all_below([[]], 7)


def test_answers_are_sent_unchanged() -> None:
    answers = [np.array(one, np.int32) for one in ([1, 2, 3], [4], [5, 6])]
    told: Learn = pickle.loads(pickle.dumps(Learn.of(answers)))
    assert [one.tolist() for one in told.answers] == [[1, 2, 3], [4], [5, 6]]
    assert Learn.of([]).answers == []
