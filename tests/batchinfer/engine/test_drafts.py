"""Tests that drafts change no answer, which sources propose drafts, and how many drafts are worth verifying."""

from __future__ import annotations

from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.drafts.acceptance import Acceptance
from batchinfer.engine.drafts.backoff import SHARE, Backoff
from batchinfer.engine.drafts.draft_value import (
    Decoding,
    choose_draft_counts,
    host_seconds,
    is_waiting_faster,
)
from batchinfer.engine.drafts.drafter import CostedDrafter
from batchinfer.engine.drafts.given_answer import MOST_GIVEN, continue_draft
from batchinfer.engine.drafts.other_answers import OtherAnswers
from batchinfer.engine.drafts.own_text import OwnText
from batchinfer.engine.drafts.source import Proposal
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer.engine.tensors.graph_sizes import GraphSteps
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.engine.driver import sequence
from tests.batchinfer.engine.hashing_model import EOS, SHAPE
from tests.batchinfer.engine.random_work import EASY, Work, works
from tests.batchinfer.engine.small_engine import Limits, Ran, Watched, drain, greedy, make_engine
from tests.batchinfer.engine.speculating import Drafts, assert_unchanged, remembered
from tests.batchinfer.engine.test_look_ahead import AHEAD, WAYS, Way, run
from tests.examples import examples

PEAKS = Peaks(1e12, 1e9)  # reading the weights takes the time of computing a thousand tokens


@settings(max_examples=examples(11, 300), deadline=None, print_blob=True)
@given(
    works(may_constrain=True),
    WAYS,
    st.sampled_from([0.0, 0.6, 1.0]),
    st.booleans(),
    st.sampled_from([0, 0.5, 1]),
)
def test_answers_do_not_depend_on_drafts(
    work: Work, way: Way, right: float, waits: bool, holds: float
) -> None:
    """Rows of all kinds, with look-ahead or without. A share of the drafts is right."""
    wanted = Way(forces=False).run(work, EASY)
    drafts = Drafts(remembered(wanted, right, work.seed), waits, holds)
    got = way.run(work, work.limits, drafts)
    assert_unchanged(got, wanted, Way().run(work, EASY))
    drafted, accepted = (sum(column) for column in zip(*drafts.took, (0, 0), strict=True))
    event(f"verified: {drafted > 0}, accepted: {accepted > 0}, rejected: {accepted < drafted}")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9))
def test_own_text_is_continued_after_the_last_longest_match(tokens: list[int], most: int) -> None:
    (found,) = OwnText().propose([_Row(tokens)], most)  # type: ignore[list-item]
    for stretch in (8, 4, 2):
        places = [
            at + stretch
            for at in range(len(tokens) - stretch)
            if tokens[at : at + stretch] == tokens[-stretch:]
        ]
        if places:
            assert found is not None
            text = list(tokens)
            for at in range(most):  # a text that repeats itself goes on
                text.append(text[places[-1] + at])
            assert list(found.tokens) == text[len(tokens) :]
            assert found.matched >= stretch
            assert tokens[places[-1] - found.matched : places[-1]] == tokens[-found.matched :]
            return
    assert found is None


def test_copying_starts_where_another_row_started_to_copy() -> None:
    source, shared, tail = OwnText(), [7, 8, 9], [5, 6]

    def proposed(text: list[int], said: list[int]) -> Proposal | None:
        row = _Row([*shared, *text, *tail, *said], prompt=len(shared) + len(text) + len(tail))
        (found,) = source.propose([row], 4)  # type: ignore[list-item]
        return found

    assert proposed(list(range(100, 130)), [100]) is None, "nothing is known of the job's answers"
    proposed(list(range(200, 230)), [999, *range(205, 214)])
    assert proposed(list(range(300, 330)), [304]) is None, "that one began with a word of its own"
    proposed(list(range(200, 230)), list(range(200, 209)))
    assert proposed(list(range(300, 330)), [300]) == Proposal(array("i", range(301, 305)), 1, agreed=True)
    assert proposed(list(range(300, 330)), [300, 301]) == Proposal(
        array("i", range(302, 306)), 2, agreed=True
    )
    assert proposed(list(range(300, 330)), [301]) is None, "it begins with something else"
    assert proposed([300], [300]) == Proposal(array("i", tail), 1, agreed=True), "up to the prompt's end"


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=40), min_size=1, max_size=30),
    st.lists(st.integers(0, 4), min_size=1, max_size=14),
)
@example(answers=[[0, 0, 1, 1, 0, 0], [1, 0, 0, 0]], end=[0, 0, 1, 1, 0, 0])
def test_other_answers_are_found_by_their_longest_match(answers: list[list[int]], end: list[int]) -> None:
    source, text = OtherAnswers(), [-1]
    for answer in answers:
        source.learn(array("i", answer))
        text += [*answer, -1]
    source.learn(array("i", [9] * 3000))  # enough to sort all of them in
    (found,) = source.propose([_Row(end)], 5)  # type: ignore[list-item]
    for stretch in (12, 6, 3):
        wanted = end[-stretch:]
        places = [
            at
            for at in range(stretch, len(text))
            if len(wanted) == stretch and text[at - stretch : at] == wanted
        ]
        if not places:
            continue
        begin = places[-1]
        expected = text[begin : min(begin + 5, text.index(-1, begin))]
        if expected:  # an answer may end there: then the source may return a shorter text
            assert found == Proposal(array("i", expected), stretch, found is not None and found.agreed)
            return
    assert found is None


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=200),
    st.lists(st.integers(0, 3), max_size=6),
    st.integers(0, 120),
    st.integers(0, 120),
)
def test_a_known_answer_continues_after_the_differing_tokens(
    draft: list[int], other: list[int], kept: int, more: int
) -> None:
    """The answer starts like the draft, has some other tokens, then continues like the draft."""
    kept = min(kept, len(draft))
    answer = [*draft[:kept], *other, *draft[kept + 2 : kept + 2 + more]]
    found = continue_draft(np.array(draft, np.int32), array("i", answer))
    if answer == draft[: len(answer)]:
        rest = draft[len(answer) : len(answer) + MOST_GIVEN]
        if len(answer) >= 8 or not answer:
            assert (found is None) == (not rest)
            assert found is None or found.tokens == rest
    if found is None or not answer:
        return
    places = range(found.matched, len(draft))
    behind = [at for at in places if draft[at - found.matched : at] == answer[-found.matched :]]
    assert found.tokens in [draft[at : at + MOST_GIVEN] for at in behind]
    nearest = len(answer)
    if nearest < len(draft):
        same = next((n for n in range(nearest) if draft[nearest - 1 - n] != answer[-1 - n]), nearest)
        assert found.matched >= min(same, 32)


def test_a_known_answer_continues_after_inserted_and_omitted_words() -> None:
    draft = np.arange(100, 160, dtype=np.int32)
    for answer in ([*range(100, 120), 1, 2, 3, *range(120, 123)], [*range(100, 120), *range(126, 129)]):
        found = continue_draft(draft, array("i", answer))
        assert found is not None
        assert found.tokens == [*range(answer[-1] + 1, 160)]


class _Row:
    """Stands in for a sequence: draft sources read only its tokens.

    Args:
        prompt: number of prompt tokens; None if all tokens are in the prompt.
    """

    def __init__(self, tokens: list[int], prompt: int | None = None) -> None:
        self.tokens, self.prompt_length = array("i", tokens), len(tokens) if prompt is None else prompt
        self.request = SimpleNamespace(params=SamplingParams())

    def __len__(self) -> int:
        return len(self.tokens)


def test_old_answers_are_forgotten() -> None:
    source = OtherAnswers(most_tokens=4000)
    source.learn(array("i", [1, 2, 3, 4, 5]))
    source.learn(array("i", [9] * 500))
    assert source.propose([_Row([1, 2, 3])], 2) == [Proposal(array("i", [4, 5]), 3)]  # type: ignore[list-item]
    for number in range(20):
        source.learn(array("i", [20 + number] * 500))
    assert source.propose([_Row([1, 2, 3])], 2) == [None]  # type: ignore[list-item]
    assert len(source._tokens) <= 4000


@given(
    st.lists(st.tuples(st.floats(0.02, 0.98), st.integers(0, 6)), min_size=1, max_size=5),
    st.floats(0.0, 0.3),
    st.integers(0, 12),
    st.integers(1, 20),
)
def test_the_number_of_verified_drafts_has_the_highest_gain(
    proposals: list[tuple[float, int]], each_s: float, free: int, certain: int
) -> None:
    """The chosen number is compared with every combination, for steps whose time grows from some number of
    drafts."""

    def seconds(drafts: int) -> float:
        return 1.0 + each_s * max(0, drafts - free)

    def tokens_a_second(counts: list[int]) -> float:
        right = sum(
            rate**place for (rate, _), n in zip(proposals, counts, strict=True) for place in range(1, n + 1)
        )
        return (certain + right) / seconds(sum(counts))

    rates = np.array([rate for rate, _ in proposals])
    lengths = np.array([n for _, n in proposals], np.int64)
    found = choose_draft_counts(rates, lengths, seconds, certain, most=100).tolist()
    assert all(count <= most for count, (_, most) in zip(found, proposals, strict=True))
    combinations: list[list[int]] = [[]]
    for _, most in proposals:
        combinations = [[*before, n] for before in combinations for n in range(most + 1)]
        combinations = sorted(combinations, key=sum)[:4000]
    best = max(map(tokens_a_second, combinations))
    none = tokens_a_second([0] * len(proposals))
    if best > 1.1 * none:
        # some numbers of drafts are not tried
        assert tokens_a_second(found) >= 0.95 * best
    else:
        assert tokens_a_second(found) >= none


def test_a_source_that_is_wrong_is_not_believed_for_a_while() -> None:
    acceptance, proposal = Acceptance(), Proposal([1, 2, 3], 8)
    before = acceptance.rate("prompt", proposal)
    for _ in range(20):
        acceptance.record_verified("prompt", proposal, 3, 0)
    assert acceptance.rate("prompt", proposal) < 0.15 < 0.5 < before
    assert acceptance.rate("answers", proposal) == before
    assert acceptance.rate("prompt", proposal._replace(matched=1)) > 0.15
    for _ in range(60):
        acceptance.record_verified("prompt", proposal, 3, 3)
    assert acceptance.rate("prompt", proposal) > 0.8
    acceptance.fade(1.0)
    assert acceptance.rate("prompt", proposal) == before


def test_a_text_that_is_copied_is_recognised_by_few_words() -> None:
    acceptance, proposal = Acceptance(), Proposal([1, 2, 3], 2)
    before = {matched: acceptance.rate("prompt", proposal._replace(matched=matched)) for matched in (1, 2, 9)}
    for _ in range(20):
        acceptance.record_verified("prompt", proposal, 3, 3)
    assert acceptance.rate("prompt", proposal._replace(matched=9)) > 0.9 > before[9]
    assert acceptance.rate("prompt", proposal._replace(matched=1)) == before[1], "which says less"
    for _ in range(100):
        acceptance.record_verified("prompt", proposal, 3, 0)
    assert acceptance.rate("prompt", proposal._replace(matched=9)) == before[9], (
        "the prior of unknown sources"
    )


def costed(
    clock: Any,
    peaks: Peaks = PEAKS,
    most_sampled: int = 64,
    most_drafts: int | None = None,
    ahead: bool = False,
) -> CostedDrafter:
    sources, times = [OwnText(), OtherAnswers()], DraftedStepTimes(SHAPE, peaks)
    return CostedDrafter(sources, times, most_sampled, ahead, clock, most_drafts=most_drafts)


def looping(count: int, most: int = 40) -> list[Any]:
    """Return rows with repetitive answers: one token is far more likely than all others."""
    return [
        replace(one, params=replace(one.params, logit_bias=((3, 40.0),), ignore_eos=True))
        for one in greedy([[i, 3, i % 5, 1] for i in range(count)], most)
    ]


@pytest.mark.parametrize(("peaks", "drafts"), [(PEAKS, True), (Peaks(1e6, 1e12), False)])
def test_nothing_is_drafted_if_steps_are_compute_bound(peaks: Peaks, drafts: bool) -> None:
    ticks = iter(range(1 << 30))
    work = Work(EASY, looping(4), [], (None,), 0, 0)
    wanted, drafter = Way().run(work, EASY), costed(lambda: next(ticks) * 1e-9, peaks)
    got = Way().run(work, EASY, drafter)
    assert got.answers == wanted.answers
    assert (got.total("drafted_tokens") > 0) == drafts
    if drafts:
        assert len(got.steps) < 0.75 * len(wanted.steps)
        assert got.total("accepted_tokens") > 0.5 * got.total("drafted_tokens")
        by_source = sum(got.total(f"{name}_accepted") for name in ("prompt", "answers"))
        assert by_source == got.total("accepted_tokens")
        assert got.total("sampled_tokens") == wanted.total("sampled_tokens")


def told(work: Work, way: Way, peaks: Peaks, held: bool = True) -> Ran:
    """Run rows with drafts, with steps that take their roofline on the clock, and free lookups."""
    ticks = iter(range(1 << 30))
    drafter = costed(lambda: next(ticks) * 1e-12, peaks, ahead=way.kind is DeviceRunner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftedStepTimes, "record_time", lambda *_: None)
        if not held:
            patch.setattr(drafter, "should_hold_step", lambda *_: False)
        return way.run(work, EASY, drafter)


SLOW = Peaks(1e9, 1e4)  # steps of a second


def test_rows_with_drafts_miss_no_step_if_the_host_is_fast() -> None:
    work = Work(EASY, looping(4, 100), [0, 3, 4, 7], (None,), 0, 0)
    wanted, alone = Way().run(work, EASY), told(work, Way(), SLOW)
    got, missing = told(work, AHEAD, SLOW), told(work, AHEAD, SLOW, held=False)
    assert got.answers == missing.answers == wanted.answers
    assert len(got.steps) < 1.15 * len(alone.steps) < 0.85 * len(missing.steps)


@pytest.mark.parametrize(
    ("rows", "plain", "seconds", "each", "pays"),
    [
        (4, 0, 0.005, 0.0, True),
        (4, 0, 0.0003, 0.0, True),  # the host takes longer than the step, in either order
        (1, 16, 0.005, 0.0, False),  # all others would wait for the one
        (8, 4, 0.005, 0.0, True),
        (8, 0, 0.0005, 0.001, False),  # rows are slow on the device and on the host
        (2, 0, 0.0012, 0.001, True),
    ],
)
def test_a_step_waits_for_drafts_if_that_gives_more_tokens_per_second(
    rows: int, plain: int, seconds: float, each: float, pays: bool
) -> None:
    """Half of the rows with drafts wait for the step in flight. Reading the weights takes `seconds`, each row
    `each` seconds."""
    behind, now = (Decoding(n, 3 * n, 3.0 * n) for n in (rows - rows // 2, rows // 2))
    assert is_waiting_faster(lambda n, _: seconds + n * each, behind, now, plain) == pays


def test_drafts_are_limited_by_memory_and_by_graphs() -> None:
    ticks = iter(range(1 << 30))
    work = Work(EASY, looping(4), [], (None,), 0, 0)
    got = Way().run(work, EASY, costed(lambda: next(ticks) * 1e-9, most_sampled=6, most_drafts=3))
    sampled = [step.sampled_tokens + step.drafted_tokens - step.accepted_tokens for step in got.steps]
    assert max(sampled) == 6
    work = replace(work, rows=looping(1))
    got = Way().run(work, EASY, costed(lambda: next(ticks) * 1e-9, most_drafts=3))
    assert max(step.drafted_tokens for step in got.steps) == 3


def test_drafts_that_replace_padding_take_no_time() -> None:
    times = DraftedStepTimes(SHAPE, Peaks(1e6, 1e12), GraphSteps(rows=64, drafted=64))
    assert times.seconds(9, 0, 1) == times.seconds(9, 0, 7) > times.seconds(8, 0, 0)
    assert times.seconds(9, 0, 7) < times.seconds(9, 0, 8), "the next size"
    assert times.seconds(33, 0, 0) == times.seconds(40, 0, 0) < times.seconds(33, 0, 8)
    assert times.seconds(60, 0, 5) < times.seconds(60, 0, 6), "the largest graph has fewer rows"
    assert times.seconds(9, 3, 1) < times.seconds(9, 3, 2), "a step that reads prompts is no such graph"


def test_looking_for_drafts_takes_a_bounded_share_of_the_time() -> None:
    """The clock makes a lookup as slow as a step: one of about twenty steps has time for a lookup."""
    drafter, asked = costed(iter(np.arange(0.0, 1e6)).__next__), list[int]()
    rows = [_Row([1, 2, 3, 1, 2]) for _ in range(8)]
    sample = run(Way(), looping(1, 2)).steps[-1]
    own = OwnText.propose

    def counted(self: OwnText, rows: Any, most: int) -> Any:
        asked.append(len(rows))
        return own(self, rows, most)

    source = drafter._sources[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(source), "propose", counted)
        for _ in range(100):
            list(drafter.propose(rows, 0, 0))  # type: ignore[arg-type]
            drafter.record_step(replace(sample, duration_s=1.0))
    assert asked[0] == 8
    assert sum(asked[1:]) <= 100 * SHARE * 8 + 8, "each look at a row takes an eighth of a second"


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({3: 1.0, 24: 4.0}, {3: 1.0, 6: 1.43, 24: 4.0, 30: 4.0}),
        # or few drafts would never be tried where many were tried first
        ({1: 1.0, 16: 3.0}, {2: 1.13, 4: 1.4, 16: 3.0}),
    ],
)
def test_times_between_two_measured_steps_are_interpolated(
    measured: dict[int, float], expected: dict[int, float]
) -> None:
    """Times are multiples of the roofline, by tokens per row."""
    times, sample = DraftedStepTimes(SHAPE, PEAKS), run(Way(), looping(4, 3)).steps[-1]
    bounds = {tokens: times.seconds(1, 0, tokens - 1) for tokens in {*measured, *expected}}
    for tokens, ratio in measured.items():
        took = replace(sample, decode_tokens=tokens, sampled_tokens=tokens, drafted_tokens=tokens - 1)
        for _ in range(60):
            times.record_time(replace(took, roofline_s=1.0, duration_s=ratio * bounds[tokens]))
    found = {tokens: times.seconds(1, 0, tokens - 1) / bounds[tokens] for tokens in expected}
    assert found == pytest.approx(expected, rel=0.05)


def test_a_step_with_drafts_that_had_to_wait_is_not_the_last_one() -> None:
    """Such a step blocks further drafts while it is remembered: only a timeout could show that others are
    faster."""
    times, sample = DraftedStepTimes(SHAPE, PEAKS), run(Way(), looping(4, 3)).steps[-1]
    plain = replace(sample, roofline_s=1.0, duration_s=times.seconds(4, 0, 0))
    for _ in range(30):
        times.record_time(plain)
    fast = times.seconds(4, 0, 4)
    drafted = replace(plain, decode_tokens=8, sampled_tokens=8, drafted_tokens=4, duration_s=10 * fast)
    times.record_time(drafted)
    slow = times.seconds(4, 0, 4)
    assert slow > 1.3 * fast
    for _ in range(20):
        times.record_time(plain)
    assert times.seconds(4, 0, 4) > fast + 0.7 * (slow - fast), "and not forgotten at once"
    for _ in range(300):
        times.record_time(plain)
    assert times.seconds(4, 0, 4) == pytest.approx(fast, rel=0.05)


@pytest.mark.parametrize("slow", [1, 2])
def test_one_slow_step_does_not_make_drafts_save_more(slow: int) -> None:
    """Each step takes a second, except for one slow step before many drafts."""
    now, steps, rows = [0.0], [0], looping(2, 120)

    def launched(_: StepPlan) -> None:
        now[0] += 1000.0 if steps[0] == slow else 1.0
        steps[0] += 1

    def clock() -> float:
        return now[0]

    drafter = CostedDrafter([OwnText()], DraftedStepTimes(SHAPE, PEAKS), 64, clock=clock)
    timed = Watched(Way().runner(Limits()), launched)
    engine = make_engine(timed, Limits(), frozenset([EOS]), drafter=drafter, peaks=PEAKS, clock=clock)
    ran = drain(engine, rows)
    assert ran.total("accepted_tokens") > 100
    saved = [step.drafts_saved_s for step in ran.steps if step.drafted_tokens]
    known = [seconds for seconds in saved if seconds is not None and seconds > -900]
    assert saved.count(None) <= 1
    assert sum(known) == pytest.approx(120 - len(ran.steps), rel=0.1)


def test_a_row_backs_off_longer_after_each_failure() -> None:
    patience, pauses = Backoff(), list[int]()
    for _ in range(10):
        patience.record_failure(100, 4)
        pauses.append(max(0, patience.resumes - 100))
        assert patience.is_over(100) == (not pauses[-1])
    assert pauses == [0, 0, 0, 0, 2, 4, 8, 16, 32, 32]
    patience.reset()
    assert patience.is_over(0)


@pytest.mark.parametrize(("ahead", "looks"), [(0, 5), (1, 1)])
def test_rows_that_miss_no_step_are_looked_at_more_often(ahead: int, looks: int) -> None:
    """If no draft is found, each lookup that waits costs the row a step."""
    asked = list[int]()

    class Silent(OwnText):
        def propose(self, rows: Any, most: int) -> list[Proposal | None]:
            asked.append(len(rows))
            return [None] * len(rows)

    times = DraftedStepTimes(SHAPE, PEAKS)
    drafter, row = CostedDrafter([Silent()], times, 200, True, lambda: 0.0), sequence([1, 2, 3], 40)
    for _ in range(8):
        drafter.propose([row], ahead, 0)
    assert sum(asked) == looks


def test_with_multi_step_decoding_drafts_must_gain_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several steps per launch save host time for steps without drafts only."""
    monkeypatch.setattr(DraftedStepTimes, "record_time", lambda *_: None)
    times = DraftedStepTimes(SHAPE, Peaks(1e15, 1e13))
    drafter, rows, taken = CostedDrafter([OwnText()], times, 64, True, lambda: 0.0), 4, list[float]()
    sample = run(Way(), looping(rows, 3)).steps[-1]
    for launched in (1, 4):
        for _ in range(200):
            drafter.record_step(replace(sample, launched_steps=launched))
        taken += [drafter._costs.seconds(rows, 0, drafts) for drafts in (0, 3)]
        assert drafter._costs.seconds(rows, 50, 0) == pytest.approx(host_seconds(rows))
    assert taken[0] == taken[1] == taken[3] == pytest.approx(host_seconds(rows))
    assert taken[2] == pytest.approx(host_seconds(rows, 4), rel=1e-3)
    assert host_seconds(rows, 4) < 0.7 * host_seconds(rows)
