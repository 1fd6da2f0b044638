"""Tests steps with several, one or no tokens per row: each position counts once, and all blocks are freed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchinfer.core.request import Request
from batchinfer.engine.schedule.sequence import Sequence
from tests.batchinfer.engine.hashing_model import VOCAB
from tests.batchinfer.engine.small_engine import Limits, Noted, Ran, drain, greedy, make_engine
from tests.batchinfer.engine.speculating import Drafts, Guess
from tests.batchinfer.engine.test_look_ahead import AHEAD, Way, run

COUNTED = ("prefill_tokens", "decode_tokens", "sampled_tokens", "recomputed_tokens", "flops")


def long_rows(count: int = 4, most: int = 21) -> list[Request]:
    return greedy([[i, 3, i % 5, 1] for i in range(count)], most, ignore_eos=True)


def next_tokens(ran: Ran, count: int, off: int = 0) -> Guess:
    """Propose the next tokens of another run's answers, or tokens that are `off`."""

    def guess(sequence: Sequence) -> list[int]:
        answer = ran.completions[sequence.request.key].tokens.token_ids.tolist()
        return [(token + off) % VOCAB for token in answer[sequence.output_length :][:count]]

    return guess


@pytest.mark.parametrize("way", [Way(), AHEAD], ids=["host", "ahead"])
def test_right_drafts_are_run_once_and_save_steps(way: Way) -> None:
    one = run(way, long_rows())
    drafts = Drafts(next_tokens(one, 3))
    got = run(way, long_rows(), drafter=drafts)
    assert got.answers == one.answers
    assert all(right == drafted for drafted, right in drafts.took)
    assert max(drafts.took) == (3, 3)
    for name in (*COUNTED, "padded_tokens"):
        assert got.total(name) == one.total(name), name
    assert len(got.steps) < (0.8 if way is AHEAD else 0.6) * len(one.steps)


def test_rejected_positions_count_as_padding_and_their_blocks_are_free_again() -> None:
    limits, rows = Limits(block_size=1), long_rows(count=1)
    one = run(Way(), rows, limits)
    drafts = Drafts(next_tokens(one, 5, off=1))
    got = run(Way(), rows, limits, drafts)
    assert got.answers == one.answers
    assert got.total("padded_tokens") == sum(drafted for drafted, _ in drafts.took) > 50
    # one block per position: blocks of the last token and of drafts are freed after the step
    assert [s.blocks_used for s in got.steps[:-1]] == [s.blocks_used for s in one.steps[:-1]]
    for name in COUNTED:
        assert got.total(name) == one.total(name), name


@pytest.mark.parametrize("way", [Way(), AHEAD], ids=["host", "ahead"])
def test_a_row_without_tokens_to_get_ends_once_its_prompt_has_run(way: Way) -> None:
    """Scoring and embedding rows need it, next to generating rows."""
    scored = greedy([[i] * 10 for i in range(3)], 0)
    answered = [replace(r, key=b"\1" + r.key[1:]) for r in long_rows(3, 5)]
    got = run(way, [*scored, *answered], Limits(budget=7))
    assert all(got.answers[r.key] == ([], "length") for r in scored)
    assert all(len(got.answers[r.key][0]) == 5 for r in answered)
    assert got.total("prefill_tokens") + got.total("cached_tokens") == 3 * 10 + 3 * 4


def test_no_step_looks_ahead_of_a_row_whose_tokens_have_to_be_known() -> None:
    """That row runs in every second step, the other row in each."""
    barred, free = long_rows(2, 8)
    barred = replace(barred, params=replace(barred.params, bad_tokens=((1, 2),)))
    noted = Noted(AHEAD.runner(Limits()))
    got = drain(make_engine(noted, Limits(), frozenset()), [barred, free])
    assert {len(tokens) for tokens, _ in got.answers.values()} == {8}
    order = [step.sampled for step in noted.steps]
    assert order == [[barred.key, free.key], [free.key]] * 4 + [[barred.key]] * 4
