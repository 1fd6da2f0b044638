"""Lookahead decoding: what was sampled behind wrong drafts comes through all runners, and is what is guessed next."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.engine.drafts.drafter import CostedDrafter
from batchinfer.engine.drafts.lookahead import MOST_GUESSES, Lookahead
from batchinfer.engine.drafts.ngram_pool import NgramPool
from batchinfer.engine.drafts.source import Proposal
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.ranks.pending_step import PendingStep
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.schedule.draft_tree import DraftTree
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer_kernels.arithmetic import NO_TOKEN
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.engine.driver import Piped, sequence
from tests.batchinfer.engine.hashing_model import EOS, HashingModel, state_of
from tests.batchinfer.engine.random_work import EASY, Work
from tests.batchinfer.engine.simulation import CPU, LLAMA_135M
from tests.batchinfer.engine.small_engine import Ran, drain, greedy, make_engine
from tests.batchinfer.engine.speculating import Guessing, branching
from tests.batchinfer.engine.test_drafts import looping
from tests.batchinfer.engine.test_look_ahead import AHEAD, Way


class Pending(Piped):
    """Runs each step when it is asked for, as the last of several stages does."""

    def launch(self, plan: Any) -> Any:
        return PendingStep(lambda: Piped.launch(self, plan))


WAYS: dict[str, tuple[Way, Any]] = {
    "at once": (Way(), Piped),
    "ahead": (AHEAD, Piped),
    "graphs": (Way(DeviceRunner, graphs=True, verifies=True), Piped),
    "micro-batches": (Way(DeviceRunner, room=5), Piped),
    "stages": (Way(), Pending),
}


def said_behind(text: Seq[int]) -> int:
    """The greedy answer's next token."""
    return int(HashingModel().argmax(torch.tensor([[state_of(text)]])))


@pytest.mark.parametrize(
    ("way", "trees"), [*((way, False) for way in WAYS), ("at once", True), ("stages", True)]
)
def test_what_was_sampled_behind_wrong_drafts_comes_through_all_runners(way: str, trees: bool) -> None:
    """Each token is what the model says behind the text and the drafts before it, as if these were right."""
    (kind, wrapped), rows = WAYS[way], greedy([[i, 3, i % 5, 1] for i in range(5)], 30, ignore_eos=True)
    wanted = kind.run(Work(EASY, rows, [], (None,), 0, 0), EASY)
    drafts = Guessing(seed=1)
    if trees:
        drafts._guess = branching(wanted, 0.5, seed=1)
    engine = make_engine(wrapped(kind.runner(EASY)), EASY, frozenset([EOS]), drafter=drafts)
    assert drain(engine, rows).answers == wanted.answers
    wrong = 0
    for text, taken in drafts.told:
        parents = taken.parents or range(-1, len(taken.drafts) - 1)
        paths = {-1: list[int]()}
        for at, parent in enumerate(parents):
            paths[at] = [*paths[parent], taken.drafts[at]]
        assert list(taken.sampled) == [said_behind([*text, *path]) for path in paths.values()]
        wrong += len(taken.drafts) - taken.right
    assert wrong > 40
    assert any(taken.parents for _, taken in drafts.told) == trees


class Reference:
    """The same in plain words: all that was ever said behind two tokens, and the newest guess of each place."""

    def __init__(self, text: list[int]) -> None:
        self.text, self.said, self.places = text, list[tuple[int, int, int]](), dict[int, int]()

    def proposed(self, most: int) -> tuple[list[int], int]:
        text = [*self.text, *self.chain(self.text, most)]
        known = len(text) > len(self.text)
        while not known and len(text) < len(self.text) + most and len(text) in self.places:
            text.append(self.places[len(text)])
        text += self.chain(text, len(self.text) + most - len(text))
        found = text[len(self.text) :]
        return [*found, *self.begun(text[-1], most - len(found))], 4 if known else 2

    def begun(self, last: int, most: int) -> list[int]:
        places = [at for at, token in enumerate(self.text[:-1]) if token == last]
        if not places:
            return self.text[max(0, len(self.text) - most) :]
        behind = self.text[places[-1] + 1 :]
        return [behind[at % len(behind)] for at in range(most)]

    def chain(self, text: list[int], most: int) -> list[int]:
        found = list[int]()
        while len(found) < most:
            pair = tuple([*text, *found][-2:])
            known = [token for *behind, token in self.said if tuple(behind) == pair]
            if not known:
                break
            found.append(known[-1])
        return found

    def verified(self, drafts: list[int], sampled: list[int]) -> int:
        """Learn; how many tokens the row takes."""
        whole = [*self.text, *drafts]
        for at, token in enumerate(sampled):
            end = len(self.text) + at
            if token != NO_TOKEN:
                self.said.append((whole[end - 2], whole[end - 1], token))
        right = 0
        while right < len(drafts) and drafts[right] == sampled[right]:
            right += 1
        self.places = {}
        for at in range(right + 1, len(sampled)):
            if sampled[at] == NO_TOKEN:
                break
            self.places[len(self.text) + at] = sampled[at]
        return right + 1


STEPS = st.tuples(
    st.integers(0, 6),
    st.integers(1, 20),
    st.lists(st.integers(0, 4), max_size=3),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=8), st.lists(STEPS, max_size=12), st.integers(0, 99))
def test_guesses_are_what_the_model_said_behind_those_before(
    prompt: list[int], steps: list[tuple[int, int, list[int], bool, bool]], seed: int
) -> None:
    """Over steps that verify any number of guesses, in which logits may be broken, and of which a row may take the
    first token alone; behind each come tokens that nothing was guessed of, as of steps without drafts or a constraint,
    and those of another row."""

    def model(text: Seq[int]) -> int:
        return hash((seed, *text[-3:])) % 5

    source, row, other = Lookahead(), sequence(prompt, 400), sequence([7, 8], 400, 1)
    reference = Reference(list(prompt))
    for number, (verified, most, plain, broken, cut) in enumerate(steps):
        (found,) = source.propose([row], most)
        assert found is not None
        assert (list(found.tokens), found.matched) == reference.proposed(min(most, MOST_GUESSES))
        drafts = list(found.tokens[:verified])
        if drafts:
            sampled = [model([*row.tokens, *drafts[:at]]) for at in range(len(drafts) + 1)]
            sampled = [*sampled[:-1], NO_TOKEN] if broken and drafts[-1] != sampled[-2] else sampled
            taken = AcceptedTokens(row, len(row), array("i", drafts), sampled=sampled)
            count = reference.verified(drafts, sampled)
            row.tokens.extend(sampled[: 1 if cut else count])
            source.verified(taken)
        row.tokens.extend(plain)
        reference.text = row.tokens.tolist()
        source.verified(AcceptedTokens(other, 2, array("i", [9]), sampled=[8, 10 + number]))
        reference.said.append((7, 8, 8))
        reference.said.append((8, 9, 10 + number))
    source.ended(row)
    source.ended(other)
    assert not source.guessed


def test_nothing_is_guessed_of_trees() -> None:
    source, row = Lookahead(), sequence([1, 2], 9)
    before = source.propose([row], 3)
    source.verified(AcceptedTokens(row, 2, array("i", [3, 4]), [-1, -1], sampled=[5, 6, 7]))
    assert source.propose([row], 3) == before


def test_guesses_of_places_that_a_row_has_not_reached_are_not_its_next_tokens() -> None:
    """Behind its first right draft another token had to come, and the rest was dropped."""
    source, row = Lookahead(), sequence([1, 2], 9)
    source.verified(AcceptedTokens(row, 2, array("i", [3, 4, 5, 6]), sampled=[3, 4, 5, 9, 8]))
    found = list[Seq[int] | None]()
    for token in (3, 7, 7, 7):
        row.tokens.append(token)
        found += [one and list(one.tokens) for one in source.propose([row], 1)]
    assert found == [[4], [7], [7], [8]]


def test_the_oldest_ngrams_are_forgotten() -> None:
    pool = NgramPool(most=6)
    for number, token in enumerate((1, 2, 3, 4, 1, 5, 6, 7)):
        pool.learn(0, token, 10 + number)
        assert len(pool) <= 6
    known = [pool.continued(0, token, 5) for token in range(1, 8)]
    assert known == [[14], [], [], [13], [15], [16], [17]]


NEVER = 11  # a token


def costed(peaks: Peaks = CPU, ahead: bool = False, source: Lookahead | None = None) -> CostedDrafter:
    """Has guesses alone, and a clock by which looking for them takes nothing."""
    ticks = iter(range(1 << 30))
    times = DraftedStepTimes(LLAMA_135M, peaks)
    source = source or Lookahead()
    return CostedDrafter([], times, 64, ahead, lambda: next(ticks) * 1e-12, lookahead=source)


def told(work: Work, way: Way, drafter: CostedDrafter) -> Ran:
    """Run rows, whose steps take what they cost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftedStepTimes, "measured", lambda *_: None)
        return way.run(work, EASY, drafter)


@pytest.mark.parametrize("way", [Way(), AHEAD])
@pytest.mark.parametrize(("peaks", "drafts"), [(CPU, True), (Peaks(1e6, 1e12), False)])
def test_rows_have_guesses_where_these_pay(way: Way, peaks: Peaks, drafts: bool) -> None:
    work = Work(EASY, looping(4), [], (None,), 0, 0)
    wanted, source = Way().run(work, EASY), Lookahead()
    got = told(work, way, costed(peaks, way == AHEAD, source))
    assert got.answers == wanted.answers
    assert not source.guessed, "all rows have ended"
    assert got.total("lookahead_drafted") == got.total("drafted_tokens")
    assert got.total("lookahead_accepted") == got.total("accepted_tokens")
    assert (got.total("drafted_tokens") > 0) == drafts
    if drafts:
        assert len(got.steps) < 0.75 * len(wanted.steps)


class Wrong(Lookahead):
    """Proposes a token that no row gets."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = list[int]()  # rows, each time

    def propose(self, rows: Seq[Sequence], most: int) -> list[Proposal | None]:
        self.asked.append(len(rows))
        return [one and one._replace(tokens=[NEVER] * len(one.tokens)) for one in super().propose(rows, most)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", [Way(), AHEAD])
def test_guesses_that_are_never_right_are_left_alone(way: Way) -> None:
    """Rows are looked at less and less often, and believed again as steps pass."""
    asked = greedy([[i, 3, i % 5, 1] for i in range(4)], 300, ignore_eos=True, logit_bias=((NEVER, -99.0),))
    source = Wrong()
    got = told(Work(EASY, asked, [], (None,), 0, 0), way, costed(ahead=way == AHEAD, source=source))
    drafted = [step.drafted_tokens for step in got.steps]
    assert 10 < sum(drafted[:30]) > 4 * sum(drafted[30:]) * 30 / len(drafted[30:])
    assert sum(source.asked) < 0.5 * sum(len(got.tokens(row)) for row in range(4))


@pytest.mark.parametrize(("ahead", "looks"), [(0, 8), (1, 1)])
def test_a_row_goes_on_with_guesses_that_were_wrong(ahead: int, looks: int) -> None:
    """They become better by that; where each time costs the row a step, it pauses."""
    times, row, given = DraftedStepTimes(LLAMA_135M, Peaks(1e15, 1e4)), sequence([1, 2, 3], 999), list[int]()
    drafter = CostedDrafter([], times, 64, True, lambda: 0.0, lookahead=Lookahead())

    def step(wrong: bool, ahead: int) -> None:
        for _, drafts in drafter.propose([row], ahead, 0):
            assert not isinstance(drafts, DraftTree)
            behind = [100 * len(row) + at for at in range(len(drafts) + 1)]
            said = behind if wrong else [*drafts, behind[0]]
            taken = AcceptedTokens(row, len(row), array("i", drafts), sampled=said)
            for token in said[: 1 if wrong else None]:
                row.tokens.append(token)
                taken.add(token)
            drafter.verified(taken)
            given.append(drafts[0])

    for _ in range(30):
        step(False, 0)
    assert len(given) == 30
    told = []
    for _ in range(8):
        step(True, ahead)
        told.append(100 * (len(row) - 1) + 1)
    assert given[31:] == told[: looks - 1]
    assert drafter._rows[row].rest is None, "what was behind a wrong guess was made of it"
