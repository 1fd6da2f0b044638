"""Answers under constraints: masked, forced where there is but one way on, whole or an error."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchinfer.core.request import Completion, Request
from batchinfer.core.samples import ConstraintWork
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampler import ConstraintMask
from batchinfer.engine.schedule.sequence import Sequence
from tests.batchinfer.engine.hashing_model import EOS, VOCAB, hashing_runner
from tests.batchinfer.engine.small_engine import Limits, Ran, drain, make_engine, watcher
from tests.batchinfer.engine.word_constraints import WordConstraints, word
from tests.examples import examples

LETTERS = [chr(ord("a") + token) for token in range(1, VOCAB)]
EASY = Limits(budget=64, seqs=8, blocks=60, block_size=4)


def run(
    rows: Seq[Request],
    limits: Limits = EASY,
    kind: Any = ModelRunner,
    forces: bool = True,
    on_host: bool = False,
) -> Ran:
    constraints = WordConstraints(EOS, forces)
    runner = hashing_runner(kind, limits.blocks, limits.block_size)
    sampler = replace(runner.sampler, mask=ConstraintMask(constraints), on_host=on_host)
    runner = replace(runner, sampler=sampler)
    return drain(
        make_engine(runner, limits, frozenset([EOS]), stop_streams=watcher, constraints=constraints), rows
    )


def request(number: int, prompt: list[int], most: int = 12, **params: Any) -> Request:
    key = np.random.default_rng(number).bytes(32)
    return Request(key, np.array(prompt, np.int32), SamplingParams(max_tokens=most, **params))


def one(*words: str, **params: Any) -> Completion:
    (found,) = run([request(0, [3, 1, 4], choice=words, **params)]).completions.values()
    return found


@st.composite
def rows(draw: Any) -> list[Request]:
    shared = draw(st.lists(st.integers(0, VOCAB - 1), max_size=10))
    found = []
    for number in range(draw(st.integers(1, 8))):
        prompt = shared[: draw(st.integers(0, len(shared)))] + draw(
            st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)
        )
        words = draw(
            st.lists(st.text(st.sampled_from(LETTERS[:3]), min_size=1, max_size=7), min_size=1, max_size=5)
        )
        params = {
            "choice": tuple(words) if draw(st.integers(0, 3)) else (),
            "temperature": draw(st.sampled_from([0.0, 1.0])),
            "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
            "min_tokens": draw(st.sampled_from([0, 3])),
            "ignore_eos": draw(st.booleans()),
            "stop": draw(st.sampled_from([(), (), ("there",)])),
            "stop_token_ids": draw(st.sampled_from([(), (), (2,)])),
            "logprobs": draw(st.sampled_from([None, None, 1])),
        }
        found.append(request(number, prompt, draw(st.integers(3, 9)), **params))
    return found


@dataclass(frozen=True)
class Cut:
    """How the work is cut."""

    limits: Limits
    kind: Any
    on_host: bool  # whether tokens are looked at before masks are filled


CUTS = st.builds(
    Cut,
    st.builds(
        Limits,
        budget=st.sampled_from([1, 3, 40]),
        seqs=st.integers(1, 6),
        caching=st.booleans(),
        blocks=st.integers(10, 15),
        block_size=st.just(4),
        scarce=st.booleans(),
    ),
    st.sampled_from([ModelRunner, DeviceRunner]),
    st.booleans(),
)


@settings(max_examples=examples(20, 120), deadline=None, print_blob=True)
@given(rows(), CUTS)
def test_answers_are_among_those_allowed_however_the_work_is_cut(work: list[Request], cut: Cut) -> None:
    """Batches, chunks, preemption, look-ahead, forced tokens and masks filled only where they are needed change no
    answer; what is not whole is an error."""
    wanted = run(work, forces=False)
    got = run(work, cut.limits, cut.kind, on_host=cut.on_host)
    assert got.answers == wanted.answers
    assert got.logprobs == wanted.logprobs
    event(f"forced: {any(s.forced_tokens for s in got.steps)}")
    event(f"preempted: {any(s.preemptions for s in got.steps)}")
    for row in work:
        answer = got.completions[row.key]
        if not row.params.choice:
            continue
        said = word([token for token in answer.token_ids.tolist() if token != EOS])
        if answer.error is None:
            assert answer.finish_reason == "stop"
            assert answer.text_length is None
            assert said in row.params.choice
        else:
            assert answer.error.code == "incomplete_output"
            assert any(text.startswith(said) for text in row.params.choice)


def test_what_has_to_come_is_not_sampled() -> None:
    found = run([request(0, [3, 1, 4], choice=("bcdef",)), request(1, [3, 1], choice=("bccc", "bddd"))])
    (whole, split) = found.completions.values()
    assert word(whole.token_ids) == "bcdef"
    assert word(split.token_ids) in ("bccc", "bddd")
    assert whole.finish_reason == split.finish_reason == "stop"
    assert sum(s.sampled_tokens for s in found.steps) == 1, "one token of one row was left to choose"
    assert sum(s.forced_tokens for s in found.steps) == 5 + 3
    assert sum(s.compile_s for s in found.steps) == 1.0
    assert sum(s.mask_s for s in found.steps) == 0.25 * len(found.steps)


def test_rows_with_log_probabilities_sample_each_token() -> None:
    answer = one("bcdef", logprobs=2)
    assert word(answer.token_ids) == "bcdef"
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 5


@pytest.mark.parametrize("on_host", [False, True])
def test_a_row_that_needs_its_constraint_is_told_from_one_that_does_not(on_host: bool) -> None:
    free = run([request(0, [3, 1, 4], 1)]).completions.popitem()[1].token_ids
    likely = word(free) + "bb"
    other = word([free[0] % (VOCAB - 1) + 1]) + "bb"
    constraints = WordConstraints(EOS, forces=False)
    steered = {}
    for words in ((likely, likely + "c"), (other, other + "c")):
        runner = hashing_runner(ModelRunner, 60, 4)
        sampler = replace(runner.sampler, mask=ConstraintMask(constraints), on_host=on_host)
        engine = make_engine(
            replace(runner, sampler=sampler), EASY, frozenset([EOS]), constraints=constraints
        )
        engine.add([request(0, [3, 1, 4], 1, choice=words)])
        (sample,) = [r for output in engine.drain() for r in output.requests]
        assert sample.constrained
        steered[words] = sample.steered
    assert list(steered.values()) == [False, True]
    assert constraints.work.mask_s // 0.25 == (1 if on_host else 2), (
        "on the host, one of two masks was needed"
    )


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"most": 3}, "max_tokens"),
        ({"stop_token_ids": (3,)}, "stop string"),
        ({"stop": ("x",)}, "stop string"),
    ],
)
def test_what_is_cut_is_an_error_that_keeps_its_tokens(params: dict[str, Any], words: str) -> None:
    (answer,) = run([request(0, [3, 1, 4], choice=("bcdefghijk",), **params)]).completions.values()
    assert answer.finish_reason == "error"
    assert answer.error is not None
    assert answer.error.code == "incomplete_output"
    assert not answer.error.retryable
    assert words in answer.error.message
    assert "bcdefghijk".startswith(word(answer.token_ids))
    assert len(answer.token_ids) > 0


def test_min_tokens_end_no_answer_in_an_error() -> None:
    """The constraint alone says when an answer may end."""
    answer = one("bc", "bcd", min_tokens=9)
    assert word([t for t in answer.token_ids if t != EOS]) in ("bc", "bcd")
    assert answer.finish_reason == "stop"


def test_a_constraint_that_cannot_be_compiled_fails_its_row_alone() -> None:
    found = run([request(0, [1], choice=("fails",)), request(1, [1], choice=("bb",))])
    failed, fine = found.completions.values()
    assert failed.error is not None
    assert failed.error.code == "constraint_failed"
    assert word(fine.token_ids) == "bb"
    assert fine.error is None


def test_an_engine_without_a_tokenizer_refuses_constraints() -> None:
    engine = make_engine(hashing_runner(ModelRunner, 60, 4), EASY, frozenset([EOS]))
    with pytest.raises(ValueError, match="cannot follow a constraint"):
        engine.add([request(0, [1], choice=("b",))])


def test_a_constraint_may_end_an_answer_before_its_longest() -> None:
    """Memory for the longest is not set aside for it, as it is where nothing else can end the answer."""
    free = SamplingParams(max_tokens=9, ignore_eos=True)
    prompt = np.arange(3, dtype=np.int32)
    exact = [
        Sequence.of(Request(b"k" * 32, prompt, params), 64, None, 0.0).exact
        for params in (free, replace(free, choice=("yes", "no")))
    ]
    assert exact == [True, False]


def test_an_engine_counts_its_own_work_alone():
    """Constraints that served another engine have worked already."""
    constraints = WordConstraints(EOS, work=ConstraintWork(compile_s=100.0, mask_s=100.0))
    runner = hashing_runner(ModelRunner, EASY.blocks, EASY.block_size)
    runner = replace(runner, sampler=replace(runner.sampler, mask=ConstraintMask(constraints)))
    engine = make_engine(runner, EASY, frozenset([EOS]), constraints=constraints)
    ran = drain(engine, [request(0, [3, 1, 4], choice=("bad", "cab"))])
    assert sum(step.compile_s for step in ran.steps) == 0.5
    assert 0 < sum(step.mask_s for step in ran.steps) < 100
