"""Tests that draft trees change no answer, and are right if a chain would be wrong."""

from __future__ import annotations

from array import array
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchinfer.core.request import Request
from batchinfer.engine.drafts.acceptance import NodeAcceptance
from batchinfer.engine.drafts.drafter import CostedDrafter
from batchinfer.engine.drafts.medusa import MedusaRunner, MedusaSource, best_shape
from batchinfer.engine.drafts.model_choice import ModelChoice
from batchinfer.engine.drafts.source import MOST_DRAFTS
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.runner.kept_states import KeptStates
from batchinfer.engine.schedule.draft_tree import (
    DraftTree,
    ancestor_bits,
    node_path,
    parents_from_bits,
    prune,
)
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.engine.hashing_model import EOS
from tests.batchinfer.engine.random_work import EASY, Work, works
from tests.batchinfer.engine.small_engine import Ran, drain, greedy, make_engine
from tests.batchinfer.engine.speculating import Drafts, assert_unchanged, branching
from tests.batchinfer.engine.test_drafts import PEAKS
from tests.batchinfer.engine.test_heads import state_of
from tests.batchinfer.engine.test_look_ahead import Way
from tests.examples import examples
from tests.speed.draft_bounds import LLAMA_135M


@settings(max_examples=examples(8, 300), deadline=None, print_blob=True)
@given(works(may_constrain=True), st.booleans(), st.sampled_from([0.3, 0.6, 0.9]))
def test_answers_do_not_depend_on_trees_of_drafts(work: Work, on_host: bool, right: float) -> None:
    """Rows of all kinds with broken logits, preemptions, forced tokens and constraints. The model's tokens
    depend on all earlier tokens and their positions."""
    work = replace(work, windows=(None,))
    wanted, way = Way(forces=False).run(work, EASY), Way(on_host=on_host)
    drafts = Drafts(branching(wanted, right, work.seed))
    got = way.run(work, work.limits, drafts)
    assert_unchanged(got, wanted, Way().run(work, EASY))
    drafted, accepted = (sum(column) for column in zip(*drafts.took, (0, 0), strict=True))
    event(
        f"accepted: {accepted > 0}, rejected: {accepted < drafted}, preempted: {got.total('preemptions') > 0}"
    )


@given(
    st.lists(st.lists(st.floats(0.01, 0.9), min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(1, 24),
)
def test_the_best_tree_has_the_most_likely_nodes(rates: list[list[float]], most: int) -> None:
    shape = best_shape(rates, most)
    paths = [()]
    chances = list[float]()
    for own in rates:
        paths = [(*path, rate) for path in paths for rate in own]
        chances += [prod(path) for path in paths]
    assert shape.chances == pytest.approx(sorted(chances, reverse=True)[:most])
    for at, (parent, depth, rank) in enumerate(zip(*shape[:3], strict=True)):
        assert parent < at
        assert depth == (0 if parent < 0 else shape.depths[parent] + 1)
        before = 1.0 if parent < 0 else shape.chances[parent]
        assert shape.chances[at] == pytest.approx(before * rates[depth][rank])
    assert len({*zip(shape.parents, shape.ranks, strict=True)}) == len(shape.parents)
    assert shape.first(3) == best_shape(rates, min(most, 3))


def test_candidates_are_counted_if_their_parents_were_right() -> None:
    tree = DraftTree([5, 6, 7, 8, 9, 4], [-1, -1, 0, 1, 1, 3], [0.5] * 6, ["a", "b", "c", "d", "e", "f"])
    row: Any = None
    taken = AcceptedTokens(row, 10, array("i", [5, 6, 8]), [-1, -1, 1])  # 7 and 9 were not run
    for token in (6, 8, 4):
        taken.add(token)
    assert (taken.path, taken.accepted, taken.rejected) == ([1, 2], 2, 1)
    counted = NodeAcceptance()
    counted.record_verified(tree, taken)
    rates = {kind: counted.rate(kind, 0.5) for kind in "abcdef"}
    assert rates == {"a": 0.4, "b": 0.6, "c": 0.5, "d": 0.6, "e": 0.5, "f": 0.5}
    counted.fade(1.0)
    assert counted.rate("b", 0.5) == 0.5


def test_the_first_of_several_drafts_is_a_tree_too() -> None:
    tree = DraftTree([5, 6, 7, 8], [-1, -1, 0, 1])
    assert tree.first(3) == DraftTree([5, 6, 7], [-1, -1, 0])
    assert prune(tree, lambda at, _: at != 0) == DraftTree([6, 8], [])
    assert prune(tree, lambda at, _: at != 1) == DraftTree([5, 7], [])
    assert prune(tree, lambda at, _: at != 2) == DraftTree([5, 6, 8], [-1, -1, 1])
    assert [node_path(tree.parents, node) for node in range(4)] == [[0], [1], [0, 2], [1, 3]]
    assert parents_from_bits(ancestor_bits(tree.parents)) == tree.parents


CPU = Peaks(1e12, 47.5e9)  # two cores


class Guessing:
    """Replaces heads and the model's norm: proposes the known answer as candidate `place` of each head."""

    def __init__(self, wanted: Ran, rows: list[Request], place: int) -> None:
        self.heads, self.place, self.asked = [None] * 3, place, 0
        self.behind = dict[int, list[int]]()
        for row in rows:
            answer = wanted.completions[row.key].tokens.token_ids.tolist()
            for at in range(len(answer)):
                self.behind[state_of([*row.prompt.tolist(), *answer[:at]])] = answer[at + 1 :][:3]

    def states(self, hidden: Tensor) -> Tensor:
        return hidden

    def tokens(self, states: Tensor, count: int, ranks: int) -> Tensor:
        self.asked = max(self.asked, ranks)
        found = torch.arange(20, 20 + ranks).repeat(len(states), count, 1)  # tokens that no row generates
        for row, state in enumerate(states[:, 0].tolist()):
            for head, token in enumerate(self.behind[state][:count]):
                if self.place < ranks:
                    found[row, head, self.place] = token
        return found


@pytest.mark.parametrize(
    ("place", "branches", "right"), [(0, False, True), (1, False, False), (1, True, True)]
)
def test_a_tree_uses_the_right_second_candidate(place: int, branches: bool, right: bool) -> None:
    """The heads cost nothing, and steps take the time of a larger model's steps."""
    rows = greedy([[i, 3, i % 5, 1] for i in range(3)], 40, ignore_eos=True, temperature=0.7)
    work, kept = Work(EASY, rows, [], (None,), 0, 0), KeptStates()
    wanted = Way().run(work, EASY)
    runner = Way().runner(EASY)
    runner = replace(runner, kept=kept, wants=runner.wants._replace(requests=True))
    heads: Any = Guessing(wanted, rows, place)
    model = MedusaSource(MedusaRunner(heads, heads, kept, 10, 4, branches), PEAKS, clock=lambda: 0.0)
    ticks = iter(range(1 << 30))
    drafter = CostedDrafter(
        [], DraftedStepTimes(LLAMA_135M, CPU), 200, clock=lambda: next(ticks) * 1e-9, model=ModelChoice(model)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftedStepTimes, "record_time", lambda *_: None)
        patch.setattr(MedusaSource, "record_time", lambda *_: None)
        engine = make_engine(runner, EASY, frozenset([EOS]), drafter=drafter)
        got = drain(engine, rows)
    assert got.answers == wanted.answers
    assert (got.total("heads_accepted") > 0) == right
    assert (len(got.steps) < 0.5 * len(wanted.steps)) == right
    assert heads.asked > 1 if branches else heads.asked == 1
    if branches:  # which it has learnt
        assert model.shape.ranks[:3] == [1, 1, 1]
        assert model.shape.chances[0] > 0.9


def test_with_many_rows_a_tree_has_few_or_no_nodes() -> None:
    """If steps are bound by arithmetic, each node must be worth its cost."""
    heads: Any = Guessing(Ran(), [], 0)
    runner = MedusaRunner(heads, heads, KeptStates(), 10, 4, True)
    choice = ModelChoice(MedusaSource(runner, PEAKS, clock=lambda: 0.0))
    rows: Any = [None] * 8
    counts = [
        choice.choose_length(rows, 0.5, 8, lambda each, cost_s=cost_s: 1 + each * cost_s, 24, 8.0)
        for cost_s in (0.0, 0.02, 0.1, 0.3, 1.0)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == MOST_DRAFTS > counts[2] > counts[3] > counts[4] == 0


def test_a_slow_proposal_is_forgotten() -> None:
    """The first proposal is slow. Otherwise such heads would never be queried again."""
    heads: Any = Guessing(Ran(), [], 0)
    model = MedusaSource(MedusaRunner(heads, heads, KeptStates(), 10, 4, True), PEAKS, clock=lambda: 0.0)
    rows: Any = [None]
    least = model.seconds(rows, 1)
    model.record_time(1, 1, 100 * least)
    slow = model.seconds(rows, 1)
    for _ in range(1000):
        model.fade(0.0)
    assert slow > 50 * least
    assert model.seconds(rows, 1) < 1.1 * least
