"""Tests that a draft model in the job's engine reads the tokens of rows and changes no answer."""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from batchinfer.core.content_root import ContentRoots
from batchinfer.engine.drafts.draft_model import (
    MOST_PROPOSED,
    DraftModelRunner,
    DraftModelSource,
    spare_blocks,
)
from batchinfer.engine.drafts.draft_value import choose_proposal_length, expected_accepted
from batchinfer.engine.drafts.drafter import CostedDrafter
from batchinfer.engine.drafts.model_choice import ModelChoice
from batchinfer.engine.drafts.own_text import OwnText
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.loop.drafting import accept_token
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.engine.hashing_model import EOS, SHAPE, VOCAB, hashing_runner
from tests.batchinfer.engine.random_work import EASY, Work, works
from tests.batchinfer.engine.small_engine import (
    MAX_LEN,
    Limits,
    Ran,
    Watched,
    drain,
    following,
    greedy,
    make_engine,
    request,
    watcher,
)
from tests.batchinfer.engine.speculating import Drafts
from tests.batchinfer.engine.test_drafts import PEAKS
from tests.batchinfer.engine.test_look_ahead import WAYS, Way
from tests.batchinfer.engine.word_constraints import WordConstraints
from tests.examples import examples


class Beside(Drafts):
    """A draft model that is queried for about 80 % of rows, with up to `most` tokens, at any cost.

    Attributes:
        always: query every row for exactly `most` tokens.
    """

    def __init__(
        self, model: DraftModelSource, random: random.Random, most: int = 5, always: bool = False
    ) -> None:
        super().__init__(lambda _: [], holds=0.3)
        self.model, self.random, self.most, self.always = model, random, most, always
        self.taken: list[AcceptedTokens] = []

    def propose(self, rows: Seq[Sequence], ahead: int, others: int) -> Iterable[tuple[Sequence, Seq[int]]]:
        asked = [
            row for row in rows if self.model.can_draft(row) and (self.always or self.random.random() < 0.8)
        ]
        asked = asked[: self.model.most_rows]
        if not asked:
            return []
        count = self.most if self.always else self.random.randint(1, self.most)
        assert self.model.seconds(asked, count) > 0
        found = [one.tokens for one in self.model.propose(asked, count)]
        for row, tokens in zip(asked, found, strict=True):
            if row.constraint is not None and row.mask is not None:
                state = row.constraint.fork()
                assert all(accept_token(state, token) for token in tokens), "the constraint does not allow it"
        return zip(asked, found, strict=True)

    def should_hold_row(self, sequence: Sequence) -> bool:
        return self.random.random() < 0.8

    def record_verified(self, outcome: AcceptedTokens) -> None:
        self.taken.append(outcome)

    def finish(self, sequence: Sequence) -> None:
        self.model.finish(sequence)

    @property
    def drafted(self) -> int:
        return sum(len(taken.drafts) for taken in self.taken)


def beside(limits: Limits, windows: tuple[int | None, ...] = (None,), **more: Any) -> DraftModelRunner:
    """Return another hashing model as a draft model, cached in blocks of layers without windows."""
    spare = spare_blocks(limits.block_size, limits.seqs)
    runner = hashing_runner(ModelRunner, limits.blocks + spare, limits.block_size, more.pop("nan_every", 0))
    found = DraftModelRunner(
        runner=runner,
        roots=ContentRoots(MAX_LEN),
        vocab=VOCAB,
        blocks=limits.blocks,
        max_num_seqs=limits.seqs,
        most_tokens=limits.budget,
        table=windows.index(None),
        target_vocab=VOCAB,
        eos_token_ids=frozenset([EOS]),
        masks=None,
    )
    return replace(found, **more)


def run(work: Work, way: Way, limits: Limits, seed: int = 0) -> tuple[Ran, Beside | None]:
    """Run the rows like `Way.run`, with a draft model if a layer has no window."""
    runner = way.runner(limits, work.nan_every, work.windows)
    runner, masks = following(runner, WordConstraints(EOS, way.forces), way.on_host)
    drafter = None
    if None in work.windows:
        made = beside(limits, work.windows, masks=masks, nan_every=work.nan_every)
        own: Any = made.runner
        made = replace(made, runner=replace(own, sampler=runner.sampler))
        drafter = Beside(DraftModelSource(made, PEAKS), random.Random(seed), MOST_PROPOSED)
    engine = make_engine(runner, limits, frozenset([EOS]), stop_streams=watcher, masks=masks, drafter=drafter)
    ran = drain(engine, work.rows, arrivals=work.arrivals)
    assert not masks._held, "a mask of a proposal is held"
    return ran, drafter


@settings(max_examples=examples(9, 300), deadline=None, print_blob=True)
@given(works(may_constrain=True), WAYS)
def test_a_model_that_is_the_jobs_is_always_right(work: Work, way: Way) -> None:
    """A wrong token would reveal a stale position: after shared prefixes, preemptions, copies or dropped
    proposals. Windows make it a different model: then only answers are compared."""
    wanted = Way(forces=False).run(work, EASY)
    got, drafter = run(work, way, work.limits, work.seed)
    assert got.answers == wanted.answers
    assert got.logprobs == wanted.logprobs
    if drafter is None:
        return
    wrong = [one for one in drafter.taken if one.accepted < len(one.drafts) and one.end is None]
    assert work.windows != (None,) or not wrong
    assert not drafter.model._states, "a row that has ended is remembered"
    event(f"verified: {drafter.drafted > 0}, preempted: {got.total('preemptions') > 0}")


@settings(max_examples=examples(3, 300), deadline=None, print_blob=True)
@given(
    st.sampled_from([1, 2, 3, 4, 8, 16, 24]),
    st.lists(st.integers(1, 50), min_size=1, max_size=4),
    st.integers(1, MOST_PROPOSED),
)
@example(16, [15, 16, 32], MOST_PROPOSED)  # the tokens before the last one fill whole blocks
def test_proposals_of_every_length_fit_their_blocks(size: int, lengths: list[int], most: int) -> None:
    limits = Limits(blocks=200, block_size=size)
    prompts = [[(at * 5 + row) % 7 for at in range(n)] for row, n in enumerate(lengths)]
    rows = greedy(prompts, 24, ignore_eos=True)
    made = beside(limits)
    drafter = Beside(DraftModelSource(made, PEAKS), random.Random(most), most, always=True)
    engine = make_engine(Way().runner(limits), limits, frozenset([EOS]), drafter=drafter)
    ran = drain(engine, rows)
    assert ran.answers == Way().run(Work(limits, rows, [], (None,), 0, 0), limits).answers
    assert all(one.accepted == len(one.drafts) or one.end is not None for one in drafter.taken)


def fed(rows: Seq[Any], limits: Limits = EASY, **more: Any) -> tuple[Ran, Any, list[int]]:
    """Run rows with the draft model; return the run, the drafter and the number of tokens of each draft step."""
    made, tokens = beside(limits, **more), list[int]()
    counting: Any = Watched(made.runner, lambda plan: tokens.append(len(plan.tokens)))
    drafter = Beside(DraftModelSource(replace(made, runner=counting), PEAKS), random.Random(0), 4)
    engine = make_engine(Way().runner(limits), limits, frozenset([EOS]), drafter=drafter)
    return drain(engine, rows), drafter, tokens


def test_a_prefix_is_read_once() -> None:
    """By rows that run together, and by later rows after the readers of the prefix have ended."""
    shared = [at % 7 for at in range(20)]
    rows = [
        replace(one, shares_next=20)
        for one in greedy([[*shared, row, row] for row in range(6)], 6, ignore_eos=True)
    ]
    limits = replace(EASY, seqs=2)
    _, drafter, tokens = fed(rows, limits)
    assert drafter.drafted > 10
    answered = sum(len(one.request.prompt) + 6 for one in {taken.sequence for taken in drafter.taken})
    assert sum(tokens) < answered - 4 * 20 + 30, "each row's own tokens, and proposals that are read again"
    _, _, alone = fed(rows, replace(limits, caching=False))
    assert sum(alone) > sum(tokens) + 3 * 20


def test_a_block_that_another_row_wrote_is_prefilled_again() -> None:
    """Rows with equal prompts get the blocks of earlier rows, which another row's answer overwrote."""
    rows = [
        request(
            at, [1, 2, 3, 4, 5, 6, 7, 8, 1] if at % 2 else [at % 11], 6 if at % 2 else 20, ignore_eos=True
        )
        for at in range(12)
    ]
    _, drafter, _ = fed(rows, replace(EASY, seqs=1, caching=False, blocks=6))
    assert drafter.drafted > 60
    assert all(one.accepted == len(one.drafts) or one.end is not None for one in drafter.taken)


def test_a_draft_model_is_not_queried_for_rows_beyond_its_positions_or_tokens() -> None:
    short = {"roots": ContentRoots(20)}
    rows = greedy([[1, 2, 3], [1] * 30], 8, ignore_eos=True)
    _, drafter, _ = fed(rows, **short)
    assert {taken.sequence.prompt_length for taken in drafter.taken} == {3}
    _, drafter, _ = fed(greedy([[1, 2, 3]], 60, ignore_eos=True), roots=ContentRoots(40))
    assert max(len(taken.sequence.tokens) for taken in drafter.taken) > 40 > drafter.drafted > 9, (
        "up to there"
    )
    few = {"vocab": VOCAB - 1}
    told = [
        request(0, [1, 2, 3], 9, ignore_eos=True),
        request(1, [1, VOCAB - 1], 9),
        request(2, [1, 2], 9, logit_bias=((VOCAB - 1, 1.0),)),
        request(3, [1, 2], 9, bad_tokens=((1, VOCAB - 1),)),
        request(4, [1, 2], 9, stop_token_ids=(VOCAB - 1,)),
    ]
    _, drafter, _ = fed(told, **few)
    assert {taken.sequence.request.key for taken in drafter.taken} <= {told[0].key}


def test_tokens_unknown_to_the_target_model_are_not_proposed() -> None:
    rows = greedy([[row, 3, 5] for row in range(6)], 30, ignore_eos=True)
    _, all_of_them, _ = fed(rows)
    ran, drafter, _ = fed(rows, target_vocab=6)
    assert ran.answers == fed(rows)[0].answers
    assert 0 < drafter.drafted < all_of_them.drafted
    assert all(token < 6 for taken in drafter.taken for token in taken.drafts)


@given(
    st.floats(0.05, 0.98),
    st.integers(1, 8),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.5),
    st.integers(0, 20),
    st.integers(0, MOST_PROPOSED),
)
def test_the_number_of_draft_tokens_has_the_highest_gain(
    rate: float, rows: int, verify_s: float, propose_s: float, others: int, most: int
) -> None:
    def seconds(each: int) -> float:
        return 1.0 + each * (verify_s * rows + propose_s)

    certain, least = rows + others, (rows + others) / 1.0
    found = choose_proposal_length(partial(expected_accepted, rate), rows, certain, seconds, most, least)
    values = {
        each: (certain + rows * expected_accepted(rate, each)) / seconds(each) for each in range(1, most + 1)
    }
    best = max(values.values(), default=0.0)
    assert 0 <= found <= most
    if found:
        assert values[found] == best > least
    else:
        assert best <= 1.03 * least


class Slow:
    """A clock that a runner advances by a time per token and per step."""

    def __init__(self, step_s: float, token_s: float) -> None:
        self.now, self._step_s, self._token_s = 0.0, step_s, token_s

    def __call__(self) -> float:
        return self.now

    def timed(self, runner: Any) -> Any:
        return Watched(runner, self._launched)

    def _launched(self, plan: StepPlan) -> None:
        self.now += self._step_s + self._token_s * len(plan.tokens)


@pytest.mark.parametrize(
    ("own_s", "model_s", "token_s", "asked"),
    [(1.0, 0.1, 0.0, True), (1.0, 0.9, 0.0, False), (0.0, 0.1, 1.0, False)],
    ids=["small", "as large", "bound by arithmetic"],
)
def test_a_draft_model_is_queried_if_it_is_faster(
    own_s: float, model_s: float, token_s: float, asked: bool
) -> None:
    """A slow draft model, or slow verification, is recognised after a few attempts."""
    rows = greedy([[row, 3, 5, 7] for row in range(4)], 120, ignore_eos=True)
    limits = replace(EASY, blocks=200)
    peaks = PEAKS if not token_s else Peaks(1e6, 1e12)
    clock, made = Slow(own_s, token_s), beside(limits)
    own = clock.timed(Way().runner(limits))
    small = Slow(model_s, token_s)
    timed = small.timed(made.runner)

    def whole() -> float:
        return clock.now + small.now

    model = DraftModelSource(replace(made, runner=timed), peaks, small)
    drafter = CostedDrafter(
        [OwnText()], DraftedStepTimes(SHAPE, peaks), 64, clock=whole, model=ModelChoice(model, whole)
    )
    engine = make_engine(own, limits, frozenset([EOS]), drafter=drafter, peaks=peaks, clock=whole)
    ran = drain(engine, rows)
    assert ran.answers == Way().run(Work(limits, rows, [], (None,), 0, 0), limits).answers
    spent = ran.total("proposing_s")
    assert spent == pytest.approx(small.now)
    if asked:
        assert ran.total("model_accepted") == ran.total("model_drafted") > 200
        assert len(ran.steps) < 50
        saved = [step.drafts_saved_s for step in ran.steps]
        assert saved.count(None) <= 3
        assert 0.6 < sum(one for one in saved if one is not None) / (120 * own_s - whole()) < 1.1
    else:
        assert spent < 0.1 * whole()
