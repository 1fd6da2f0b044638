"""Steps that give a sequence none, one or several tokens: the same answers as with one, every block accounted for."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.loop.engine import Draft
from batchinfer.engine.schedule.sequence import Sequence
from tests.batchinfer.engine.small_engine import Limits, Ran, greedy, make_engine, watcher
from tests.batchinfer.engine.speculating import VOCAB, Speculating, next_token
from tests.examples import examples

EOS = 0


def guesses(seed: int, right: float) -> Draft:
    """Drafts of which a share is right."""
    rng = random.Random(seed)

    def draft(sequence: Sequence) -> list[int]:
        tokens = list(sequence.tokens)
        for _ in range(rng.randrange(5)):
            token = next_token(tokens)
            tokens.append(token if rng.random() < right else rng.randrange(VOCAB))
        return tokens[len(sequence) :]

    return draft


def run(
    runner: Speculating, limits: Limits, rows: Seq[Request], draft: Draft | None = None, seed: int = 0
) -> Ran:
    """Requests arrive at random; integrity is checked after every step."""
    runner.block_size = limits.block_size
    engine = make_engine(runner, limits, frozenset([EOS]), stop_streams=watcher, draft=draft)
    arrivals, waiting, ran = random.Random(seed), list(rows)[::-1], Ran()
    while waiting or engine.unfinished:
        while waiting and (arrivals.random() < 0.4 or not engine.unfinished):
            engine.add([waiting.pop()])
        output = engine.step()
        engine.check_integrity()
        for completion in output.completions:
            assert completion.key not in ran.completions
            ran.completions[completion.key] = completion
        ran.steps += [output.sample] if output.sample else []
        assert len(ran.steps) < 5000, "the engine does not get ahead"
    assert engine.step().sample is None, "a step was left on the device"
    assert engine._scheduler.pool.used == 0
    return ran


@st.composite
def requests(draw: Any, number: int, shared: list[int]) -> Request:
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9))
    most = draw(st.integers(0, 14))
    params = SamplingParams(
        max_tokens=most,
        min_tokens=draw(st.integers(0, most)) if draw(st.booleans()) else 0,
        ignore_eos=draw(st.booleans()),
        stop=("there",) if draw(st.integers(0, 3)) == 0 else (),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=1))),
        logprobs=draw(st.sampled_from([None, 2])),
    )
    prompt = shared[: draw(st.integers(0, len(shared)))] + own
    return Request(number.to_bytes(32, "big"), np.array(prompt, np.int32), params)


@dataclass(frozen=True)
class Case:
    limits: Limits
    rows: list[Request]
    looks_ahead: bool
    drafting: float | None  # the share of drafts that are right; None: no drafts
    nan_every: int
    windows: tuple[int | None, ...]  # of cache groups
    seed: int


@st.composite
def cases(draw: Any) -> Case:
    shared = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0, max_size=14))
    rows = [draw(requests(i, shared)) for i in range(draw(st.integers(1, 9)))]
    windows = draw(st.sampled_from([(None,), (None,), (3,), (None, 6), (12, None, 1)]))
    limits = Limits(
        budget=draw(st.sampled_from([1, 3, 8, 40])),
        seqs=draw(st.integers(1, 6)),
        caching=draw(st.booleans()),
        blocks=draw(st.integers(10, 15)) * len(windows),
        block_size=4,
        scarce=draw(st.booleans()),
    )
    drafting, nan_every = draw(st.sampled_from([None, 0.0, 0.5, 1.0])), draw(st.sampled_from([0, 0, 11]))
    return Case(
        limits, rows, draw(st.booleans()), drafting, nan_every, windows, draw(st.integers(0, 1 << 16))
    )


@settings(max_examples=examples(50, 250), deadline=None, print_blob=True)
@given(cases())
def test_answers_are_those_of_one_token_a_step(case: Case) -> None:
    """Random numbers of tokens, drafts and rejections, barriers, lengths, stops, broken logits and preemptions."""
    one = Speculating(nan_every=case.nan_every, windows=case.windows)
    wanted = run(one, case.limits, case.rows, seed=case.seed)
    runner = Speculating(
        looks_ahead=case.looks_ahead,
        nan_every=case.nan_every,
        barriers=lambda request: request.key[-1] % 2 == 0,
        windows=case.windows,
        random=random.Random(case.seed),
    )
    draft = None if case.drafting is None else guesses(case.seed, case.drafting)
    got = run(runner, case.limits, case.rows, draft, case.seed)
    assert got.answers == wanted.answers
    assert got.logprobs == wanted.logprobs
    tokens = sum(len(c.token_ids) + (c.error is not None) for c in got.completions.values())
    assert sum(s.sampled_tokens for s in got.steps) == tokens
    names = ("prefill_tokens", "decode_tokens", "padded_tokens")
    assert sum(getattr(s, name) for s in got.steps for name in names) == runner.ran
    assert all(getattr(s, name) >= 0 for s in got.steps for name in names)
    event(f"preempted: {any(s.preemptions for s in got.steps)}")
    event(f"rejected: {runner.rejected > 0}, accepted: {runner.accepted > 0}")
    event(f"none at once: {0 in runner.counts}, several: {max(runner.counts, default=0) > 1}")


def long_rows(count: int = 4, most: int = 20) -> list[Request]:
    return greedy([[i, 3, i % 5, 1] for i in range(count)], most, ignore_eos=True)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_right_drafts_are_run_once_and_save_steps(looks_ahead: bool) -> None:
    rows = long_rows(most=21)
    one = run(Speculating(looks_ahead), Limits(), rows)
    runner = Speculating(looks_ahead)

    def draft(sequence: Sequence) -> list[int]:
        tokens = list(sequence.tokens)
        for _ in range(3):
            tokens.append(next_token(tokens))
        return tokens[len(sequence) :]

    got = run(runner, Limits(), rows, draft)
    assert got.answers == one.answers
    assert runner.rejected == 0
    for name in ("prefill_tokens", "decode_tokens", "sampled_tokens", "padded_tokens", "flops"):
        assert sum(getattr(s, name) for s in got.steps) == sum(getattr(s, name) for s in one.steps), name
    assert max(runner.counts) == 4
    assert len(got.steps) < (0.8 if looks_ahead else 0.6) * len(one.steps)


def test_rejected_positions_count_as_padding_and_their_blocks_are_free_again() -> None:
    rows = long_rows(count=1)
    limits = Limits(block_size=1)
    one = run(Speculating(), limits, rows)
    runner = Speculating()

    def draft(sequence: Sequence) -> list[int]:
        return [(next_token(sequence.tokens) + 1) % VOCAB] * 5

    got = run(runner, limits, rows, draft)
    assert got.answers == one.answers
    assert runner.accepted == 0
    assert sum(s.padded_tokens for s in got.steps) == runner.rejected > 50
    # a block a position: those of the last token and of the drafts are not held once the step has ended
    assert [s.blocks_used for s in got.steps[:-1]] == [s.blocks_used for s in one.steps[:-1]]
    for name in ("prefill_tokens", "decode_tokens", "sampled_tokens", "recomputed_tokens", "flops"):
        assert sum(getattr(s, name) for s in got.steps) == sum(getattr(s, name) for s in one.steps), name


def test_a_stop_in_the_middle_of_several_tokens_drops_the_rest() -> None:
    prompt = [1, 2, 3]
    answer: list[int] = []
    while len(answer) < 9:
        answer.append(next_token(prompt + answer))
    stop = next(t for i, t in enumerate(answer) if i >= 2 and t not in answer[:i])
    ends = answer.index(stop) + 1

    class Nine(Speculating):
        def _changed(self, known: list[int], given: list[int]) -> list[int]:
            return answer

    (row,) = greedy([prompt], 9, stop_token_ids=(stop,), ignore_eos=True)
    got = run(Nine(random=random.Random(0)), Limits(), [row])
    assert got.answers == {row.key: (answer[:ends], "stop")}
    assert [s.sampled_tokens for s in got.steps] == [ends]
    short = replace(row, params=SamplingParams(max_tokens=2, ignore_eos=True))
    got = run(Nine(random=random.Random(0)), Limits(), [short])
    assert got.answers == {row.key: (answer[:2], "length")}


def test_a_sequence_without_tokens_to_get_ends_once_its_prompt_has_run() -> None:
    """As scoring and embedding need it; beside sequences that get tokens."""
    for looks_ahead in (False, True):
        rows = [
            *greedy([[i] * 10 for i in range(3)], 0),
            *[replace(r, key=b"\1" + r.key[1:]) for r in long_rows(3, 5)],
        ]
        runner = Speculating(looks_ahead)
        got = run(runner, Limits(budget=7), rows)
        assert all(got.answers[r.key] == ([], "length") for r in rows[:3])
        assert all(len(got.answers[r.key][0]) == 5 for r in rows[3:])
        assert (
            sum(s.prefill_tokens for s in got.steps) + sum(s.cached_tokens for s in got.steps)
            == 3 * 10 + 3 * 4
        )


def test_no_step_looks_ahead_of_a_barrier() -> None:
    """The sequence with one runs in every second step; the other in each."""
    barred, free = long_rows(2, 8)
    order: list[list[bytes]] = []

    class Watched(Speculating):
        def launch(self, chunks: list[Any], copies: Any = ()) -> Any:
            order.append([c.sequence.request.key for c in chunks])
            return super().launch(chunks, copies)

    runner = Watched(looks_ahead=True, barriers=lambda request: request.key == barred.key)
    engine = make_engine(runner, Limits(), frozenset())
    runner.block_size = Limits().block_size
    engine.add([barred, free])
    answers = {c.key: c.token_ids.tolist() for output in engine.drain() for c in output.completions}
    assert {len(a) for a in answers.values()} == {8}
    assert order[:8] == [[barred.key, free.key], [free.key]] * 4
    assert order[8:] == [[barred.key], [barred.key], [barred.key], [barred.key]]


def test_a_runner_that_breaks_its_word_is_told() -> None:
    class Wrong(Speculating):
        def _next(self, sequence: Sequence) -> list[int]:
            return [*super()._next(sequence), 1]

    with pytest.raises(ValueError, match="gave 2 tokens to a sequence that the next step runs already"):
        run(Wrong(looks_ahead=True), Limits(), long_rows(1))
