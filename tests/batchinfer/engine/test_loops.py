"""Answers that run in circles end: at the same token as a plain reading of the rule says, however their tokens come."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchinfer.core.request import Request
from batchinfer.engine.schedule.loops import LoopDetector
from tests.batchinfer.engine.hashing_model import EOS
from tests.batchinfer.engine.random_work import Work, works
from tests.batchinfer.engine.small_engine import Limits, drain, make_engine, request
from tests.batchinfer.engine.speculating import Drafts, Speculating, next_token
from tests.batchinfer.engine.test_look_ahead import Way, run
from tests.batchinfer.engine.test_token_counts import guesses
from tests.examples import examples


def looped(answer: Seq[int], least: int) -> bool:
    """The rule as the documentation has it."""
    least = max(least, 4)
    last = list(answer[-least:])
    return len(last) == least and any(last[c:] == last[:-c] for c in range(1, least // 4 + 1))


PIECES = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 9))


@settings(max_examples=examples(300, 3000), deadline=None)
@given(st.lists(PIECES, max_size=8), st.integers(0, 40))
def test_a_loop_is_found_at_the_token_that_closes_it(pieces: list[tuple[list[int], int]], least: int) -> None:
    """Pieces that repeat, one after the other, of few different tokens: cycles within cycles, and ones that break."""
    answer = [token for piece, times in pieces for token in piece * times]
    prompt = [1, 1, 1, 1, 1]
    tokens, detector = array("i", prompt), LoopDetector(least, len(prompt))
    for end, token in enumerate(answer, 1):
        tokens.append(token)
        tokens.extend([1, 1])  # placeholders of steps in flight
        assert detector.closes(tokens, len(prompt) + end) == looped(answer[:end], least), end
        del tokens[-2:]


def test_a_token_takes_the_same_time_in_an_answer_of_any_length() -> None:
    """Operations on tokens are counted: none is looked at more than a few times."""

    class Counted(array):  # type: ignore[type-arg]
        reads = 0

        def __getitem__(self, at: int | slice) -> object:
            Counted.reads += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
            return super().__getitem__(at)

    tokens = Counted("i", np.random.default_rng(1).integers(0, 50_000, 20_000).tolist())
    detector = LoopDetector(512, 0)
    assert not any(detector.closes(tokens, end) for end in range(1, len(tokens) + 1))
    assert Counted.reads < 2 * len(tokens)


def circling(known: Seq[int], nan_every: int = 0) -> int:
    """A model that falls into a circle of 1 to 3 tokens for a while, as often as not."""
    at = len(known) // 30
    period = random.Random(at).randrange(-2, 4)
    return known[-period] if 0 < period < len(known) else next_token(known)


def rows_of(work: Work, least: int) -> list[Request]:
    return [
        request(row, one.prompt.tolist(), 80, repetition_stop=least, min_tokens=one.params.min_tokens)
        for row, one in enumerate(work.rows)
    ]


def expected(one: Request, eos: int) -> tuple[list[int], str]:
    answer: list[int] = []
    while len(answer) < 80:
        answer.append(circling([*one.prompt.tolist(), *answer]))
        if len(answer) >= one.params.min_tokens:
            if answer[-1] == eos:
                return answer, "stop"
            if looped(answer, one.params.repetition_stop):
                return answer, "repetition"
    return answer, "length"


# While a step runs, one of its sequences is preempted, and the step is counted again for its drafts
PREEMPTED = Work(
    Limits(budget=3, seqs=3, blocks=30, block_size=4, scarce=True),
    [
        request(row, prompt, 0)
        for row, prompt in enumerate([[0], [0, 0], [0, 0, 0, 0, 1], [0] * 7, [0, 0], [0]])
    ],
    arrivals=[0, 0, 3, 3, 3, 3],
    windows=(12, None, 1),
    nan_every=0,
    seed=1735,
)


@settings(max_examples=examples(25, 250), deadline=None, print_blob=True)
@given(
    work=works(), right=st.sampled_from([None, 0.5, 1.0]), looks_ahead=st.booleans(), least=st.integers(1, 16)
)
@example(work=PREEMPTED, right=1.0, looks_ahead=True, least=8)
def test_answers_end_where_they_loop(work: Work, right: float | None, looks_ahead: bool, least: int) -> None:
    """With any number of tokens a step, drafts, look-ahead and preemptions."""
    rows, limits = rows_of(work, least), work.limits
    runner = Speculating(looks_ahead, windows=work.windows, random=random.Random(work.seed), model=circling)
    runner.block_size, runner.barriers = limits.block_size, lambda one: one.key[-1] % 2 == 0
    limits = replace(limits, blocks=limits.blocks + 40 * len(work.windows))
    drafter = None if right is None else Drafts(guesses(work.seed, right))
    got = drain(make_engine(runner, limits, frozenset([EOS]), drafter=drafter), rows, arrivals=work.arrivals)
    assert got.answers == {one.key: expected(one, EOS) for one in rows}


@pytest.mark.parametrize("forces", [False, True])
def test_an_answer_that_loops_under_a_constraint_is_incomplete(forces: bool) -> None:
    """Even if its tokens are forced: they had to come, and are a loop all the same."""
    rows = [
        request(0, [3, 4], 40, choice=("bcbcbcbcbcbcbcbcd",), repetition_stop=8),
        request(1, [3, 4], 40, choice=("bcbcbcbcbcbcbcbcd",)),
    ]
    got = run(Way(forces=forces), rows)
    cut, whole = (got.completions[one.key] for one in rows)
    assert cut.error is not None
    assert cut.error.code == "incomplete_output"
    assert "a loop (sampling.repetition_stop) ended the answer" in cut.error.message
    assert (len(cut.tokens.token_ids), whole.error, whole.finish_reason) == (8, None, "stop")
