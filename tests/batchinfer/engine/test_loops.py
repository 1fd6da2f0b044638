"""Tests that looping answers end at the token of a plain reference, however their tokens arrive."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchinfer.engine.schedule.loops import LoopDetector
from tests.batchinfer.engine.random_work import EASY, Work, works
from tests.batchinfer.engine.small_engine import request
from tests.batchinfer.engine.speculating import Drafts, remembered
from tests.batchinfer.engine.test_look_ahead import WAYS, Way, run
from tests.examples import examples


def looped(answer: Seq[int], least: int) -> bool:
    """Return True if the answer loops by the documentation's rule."""
    least = max(least, 4)
    last = list(answer[-least:])
    return len(last) == least and any(last[c:] == last[:-c] for c in range(1, least // 4 + 1))


PIECES = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 9))


@settings(max_examples=examples(100, 3000), deadline=None)
@given(st.lists(PIECES, max_size=8), st.integers(0, 40))
def test_a_loop_is_found_at_the_token_that_closes_it(pieces: list[tuple[list[int], int]], least: int) -> None:
    """The pieces repeat few tokens: cycles within cycles, and cycles that break."""
    answer = [token for piece, times in pieces for token in piece * times]
    prompt = [1, 1, 1, 1, 1]
    tokens, detector = array("i", prompt), LoopDetector(least, len(prompt))
    for end, token in enumerate(answer, 1):
        tokens.append(token)
        tokens.extend([1, 1])  # placeholders of steps in flight
        assert detector.closes(tokens, len(prompt) + end) == looped(answer[:end], least), end
        del tokens[-2:]


def test_a_token_takes_the_same_time_in_an_answer_of_any_length() -> None:
    """Counts operations on tokens: each token is compared at most a few times."""

    class Counted(array):  # type: ignore[type-arg]
        reads = 0

        def __getitem__(self, at: int | slice) -> object:
            Counted.reads += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
            return super().__getitem__(at)

    tokens = Counted("i", np.random.default_rng(1).integers(0, 50_000, 20_000).tolist())
    detector = LoopDetector(512, 0)
    assert not any(detector.closes(tokens, end) for end in range(1, len(tokens) + 1))
    assert Counted.reads < 2 * len(tokens)


def truncate(answer: list[int], least: int, from_on: int) -> tuple[list[int], str]:
    ends = (end for end in range(max(1, from_on), len(answer) + 1) if looped(answer[:end], least))
    end = next(ends, None)
    return answer[:end], "length" if end is None else "repetition"


@settings(max_examples=examples(5, 250), deadline=None, print_blob=True)
@given(
    work=works(), way=WAYS, right=st.sampled_from([None, 0.5, 1.0]), least=st.sampled_from([1, 4, 6, 8, 16])
)
def test_answers_end_when_they_loop(work: Work, way: Way, right: float | None, least: int) -> None:
    """With several tokens per step, drafts, look-ahead and preemptions. Answers consist of two tokens and
    loop often."""
    rows = [
        request(row, one.prompt.tolist(), 24, allowed_token_ids=(1, 2), min_tokens=one.params.min_tokens)
        for row, one in enumerate(work.rows)
    ]
    endless = Way().run(replace(work, rows=rows, nan_every=0), EASY)
    looping = [replace(one, params=replace(one.params, repetition_stop=least)) for one in rows]
    limits = replace(work.limits, blocks=work.limits.blocks + 12 * len(work.windows))
    drafter = None if right is None else Drafts(remembered(endless, right, work.seed))
    got = way.run(replace(work, rows=looping, nan_every=0), limits, drafter)
    least_tokens = {one.key: one.params.min_tokens for one in rows}
    assert got.answers == {
        key: truncate(tokens, least, least_tokens[key]) for key, (tokens, _) in endless.answers.items()
    }
    event(f"looped: {any(reason == 'repetition' for _, reason in got.answers.values())}")


@pytest.mark.parametrize("forces", [False, True])
def test_an_answer_that_loops_under_a_constraint_is_incomplete(forces: bool) -> None:
    """Forced tokens also make a loop."""
    rows = [
        request(0, [3, 4], 40, choice=("bcbcbcbcbcbcbcbcd",), repetition_stop=8),
        request(1, [3, 4], 40, choice=("bcbcbcbcbcbcbcbcd",)),
    ]
    got = run(Way(forces=forces), rows)
    truncated, whole = (got.completions[one.key] for one in rows)
    assert truncated.error is not None
    assert truncated.error.code == "incomplete_output"
    assert "a loop (sampling.repetition_stop) ended the answer" in truncated.error.message
    assert (len(truncated.tokens.token_ids), whole.error, whole.finish_reason) == (8, None, "stop")
