"""Steps that give a sequence none, one or several tokens: the same answers as with one, every block accounted for."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchinfer.core.request import Request
from batchinfer.engine.schedule.sequence import Sequence
from tests.batchinfer.engine.random_work import Work, works
from tests.batchinfer.engine.small_engine import Limits, Noted, Ran, drain, greedy, make_engine, watcher
from tests.batchinfer.engine.speculating import VOCAB, Drafts, Guess, Speculating, next_token
from tests.examples import examples

EOS = 0


def guesses(seed: int, right: float) -> Guess:
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
    runner: Speculating,
    limits: Limits,
    rows: Seq[Request],
    draft: Guess | None = None,
    arrivals: Seq[int] = (),
) -> Ran:
    runner.block_size = limits.block_size
    engine = make_engine(
        runner, limits, frozenset([EOS]), stop_streams=watcher, drafter=draft and Drafts(draft)
    )
    return drain(engine, rows, arrivals=arrivals)


@settings(max_examples=examples(20, 250), deadline=None, print_blob=True)
@given(works(), st.sampled_from([None, 0.0, 0.5, 1.0]), st.booleans())
def test_answers_are_those_of_one_token_a_step(work: Work, right: float | None, looks_ahead: bool) -> None:
    """Random numbers of tokens, drafts of which a share is right, rejections, barriers, lengths, stops, broken logits
    and preemptions change no answer."""
    one = Speculating(nan_every=work.nan_every, windows=work.windows)
    wanted = run(one, work.limits, work.rows, arrivals=work.arrivals)
    runner = Speculating(
        looks_ahead=looks_ahead,
        nan_every=work.nan_every,
        barriers=lambda request: request.key[-1] % 2 == 0,
        windows=work.windows,
        random=random.Random(work.seed),
    )
    draft = None if right is None else guesses(work.seed, right)
    got = run(runner, work.limits, work.rows, draft, work.arrivals)
    assert got.answers == wanted.answers
    assert got.logprobs == wanted.logprobs
    tokens = sum(len(c.tokens.token_ids) + (c.error is not None) for c in got.completions.values())
    assert got.total("sampled_tokens") == tokens
    names = ("prefill_tokens", "decode_tokens", "padded_tokens")
    assert sum(map(got.total, names)) == runner.ran
    assert all(getattr(s, name) >= 0 for s in got.steps for name in names)
    event(f"preempted: {got.total('preemptions') > 0}")
    event(f"rejected: {runner.rejected > 0}, accepted: {runner.accepted > 0}")
    event(f"none at once: {0 in runner.counts}, several: {max(runner.counts, default=0) > 1}")


def long_rows(count: int = 4, most: int = 20) -> list[Request]:
    return greedy([[i, 3, i % 5, 1] for i in range(count)], most, ignore_eos=True)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_right_drafts_are_run_once_and_save_steps(looks_ahead: bool) -> None:
    one, runner = run(Speculating(looks_ahead), Limits(), long_rows(most=21)), Speculating(looks_ahead)

    def draft(sequence: Sequence) -> list[int]:
        tokens = list(sequence.tokens)
        for _ in range(3):
            tokens.append(next_token(tokens))
        return tokens[len(sequence) :]

    got = run(runner, Limits(), long_rows(most=21), draft)
    assert got.answers == one.answers
    assert runner.rejected == 0
    for name in ("prefill_tokens", "decode_tokens", "sampled_tokens", "padded_tokens", "flops"):
        assert got.total(name) == one.total(name), name
    assert max(runner.counts) == 4
    assert len(got.steps) < (0.8 if looks_ahead else 0.6) * len(one.steps)


def test_rejected_positions_count_as_padding_and_their_blocks_are_free_again() -> None:
    limits, rows, runner = Limits(block_size=1), long_rows(count=1), Speculating()
    one = run(Speculating(), limits, rows)
    got = run(runner, limits, rows, lambda sequence: [(next_token(sequence.tokens) + 1) % VOCAB] * 5)
    assert got.answers == one.answers
    assert runner.accepted == 0
    assert got.total("padded_tokens") == runner.rejected > 50
    # a block a position: those of the last token and of the drafts are not held once the step has ended
    assert [s.blocks_used for s in got.steps[:-1]] == [s.blocks_used for s in one.steps[:-1]]
    for name in ("prefill_tokens", "decode_tokens", "sampled_tokens", "recomputed_tokens", "flops"):
        assert got.total(name) == one.total(name), name


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_sequence_without_tokens_to_get_ends_once_its_prompt_has_run(looks_ahead: bool) -> None:
    """Scoring and embedding need it, beside sequences that get tokens."""
    scored = greedy([[i] * 10 for i in range(3)], 0)
    answered = [replace(r, key=b"\1" + r.key[1:]) for r in long_rows(3, 5)]
    got = run(Speculating(looks_ahead), Limits(budget=7), [*scored, *answered])
    assert all(got.answers[r.key] == ([], "length") for r in scored)
    assert all(len(got.answers[r.key][0]) == 5 for r in answered)
    assert got.total("prefill_tokens") + got.total("cached_tokens") == 3 * 10 + 3 * 4


def test_no_step_looks_ahead_of_a_barrier() -> None:
    """The sequence with one runs in every second step; the other in each."""
    barred, free = long_rows(2, 8)
    runner = Noted(Speculating(looks_ahead=True, barriers=lambda request: request.key == barred.key))
    runner.runner.block_size = Limits().block_size
    got = drain(make_engine(runner, Limits(), frozenset()), [barred, free])
    assert {len(tokens) for tokens, _ in got.answers.values()} == {8}
    order = [step.sampled for step in runner.steps]
    assert order == [[barred.key, free.key], [free.key]] * 4 + [[barred.key]] * 4


def test_a_runner_that_breaks_its_word_is_told() -> None:
    class Wrong(Speculating):
        def _next(self, sequence: Sequence) -> list[int]:
            return [*super()._next(sequence), 1]

    with pytest.raises(ValueError, match="gave 2 tokens to a sequence that the next step runs already"):
        run(Wrong(looks_ahead=True), Limits(), long_rows(1))
