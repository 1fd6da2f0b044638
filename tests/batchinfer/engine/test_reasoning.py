"""Tests constraints that begin after the reasoning, and reasoning budgets, in one batch with other rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from batchinfer.core.reasoning import ReasoningTokens, locate_reasoning
from batchinfer.core.request import Completion, Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.after_reasoning import FreeMasks, ReasonedConstraint
from tests.batchinfer.engine import guided_rows
from tests.batchinfer.engine.guided_rows import KINDS, Row, tokenizer
from tests.batchinfer.engine.small_engine import Limits, Ran, looking_ahead
from tests.batchinfer.engine.test_guided import ALONE, WAYS, cpu_runner
from tests.checkpoints import EOS, IM_START, PAD, VOCAB

GAP = tuple(tokenizer().rust.encode("\n\n", add_special_tokens=False).ids)
HEADER = (PAD, IM_START)
# Ways in which prompts and models mark reasoning
MARKS = {
    "opened": ReasoningTokens((), (PAD,), gap=GAP),
    "unsaid": ReasoningTokens((IM_START,), (PAD,), gap=GAP),
    "channels": ReasoningTokens((IM_START, 5, PAD), (IM_START, 7, *HEADER), answer=HEADER),
}
BUDGETS = (None, 0, 9)
WISHES = {
    "greedy": {},
    "sampled": {"temperature": 1.5},
    "logprobs": {"temperature": 1.0, "logprobs": 1},
    "confidence": {"temperature": 1.0, "confidence": True},
}
NATURAL = 6  # tokens before a marker that the model writes of itself


@dataclass(frozen=True)
class Thinker:
    """A row that may reason."""

    row: Row
    marks: ReasoningTokens
    budget: int | None

    @property
    def request(self) -> Request:
        return self.row.request


def _made(number: int, kind: str, wish: str, marks: ReasoningTokens, budget: int | None) -> Thinker:
    rng = np.random.default_rng(number)
    shared = np.random.default_rng(3).integers(0, 256, 40)
    prompt = np.append(shared if number % 3 else shared[:0], rng.integers(0, 256, 1 + number % 5))
    given = {"max_tokens": 80, **KINDS[kind].params, **WISHES[wish], "thinking_budget": budget}
    params = SamplingParams(**given, after_reasoning=tuple(marks))
    return Thinker(Row(kind, wish, Request(rng.bytes(32), prompt.astype(np.int32), params)), marks, budget)


def _with_budgets() -> Iterator[Thinker]:
    number = 0
    for name, marks in MARKS.items():
        for kind in ("schema", "choice", "free"):
            wish = list(WISHES)[number % len(WISHES)]
            budget = BUDGETS[number % 3] if name == "opened" else BUDGETS[1 + number % 2]
            number += 1
            yield _made(number, kind, wish, marks, budget)


@cache
def work() -> list[Thinker]:
    """Return rows with a budget, rows that end their reasoning themselves, and rows without reasoning."""
    made = list(_with_budgets())
    plain = [_made(100 + n, "free", wish, MARKS["opened"], None) for n, wish in enumerate(WISHES)]
    free = [Row("free", one.row.wish, _without(one.request)) for one in plain]
    ran = guided_rows.run(cpu_runner(ALONE), ALONE, free)
    for one in plain:
        said = ran.completions[one.request.key].tokens.token_ids.tolist()
        marks = ReasoningTokens((), (said[said.index(said[NATURAL])],), gap=GAP)
        for kind in ("regex", "free"):
            params = {**KINDS[kind].params, **WISHES[one.row.wish], "max_tokens": 80}
            request = Request(
                one.request.key[:31] + kind[:1].encode(),
                one.request.prompt,
                SamplingParams(**params, after_reasoning=tuple(marks)),
            )
            made.append(Thinker(Row(kind, one.row.wish, request), marks, None))
    return [*made, *(Thinker(row, MARKS["opened"], None) for row in free)]


def _without(request: Request) -> Request:
    params = {
        "max_tokens": 80,
        "temperature": request.params.temperature,
        "logprobs": request.params.logprobs,
        "confidence": request.params.confidence,
    }
    return Request(request.key, request.prompt, SamplingParams(**params))


def run(runner: object, limits: Limits) -> Ran:
    return guided_rows.run(runner, limits, [one.row for one in work()])


@cache
def alone() -> Ran:
    return run(cpu_runner(ALONE), ALONE)


def check(one: Thinker, completion: Completion) -> str:
    """Return the outcome of a row after checking its answer, its constraint and its reasoning budget."""
    params, ids = one.request.params, completion.tokens.token_ids.tolist()
    if params.reasoning is None:
        return "plain"
    start, end, answer, reasons = locate_reasoning(ids, one.marks)
    assert one.budget is None or end - start <= one.budget
    assert (completion.tokens.logprobs is not None) == params.asks_logprobs
    if params.constraint is None:
        assert completion.error is None
        return "free"
    assert reasons or answer == len(one.marks.answer)
    if completion.error is not None:
        assert completion.error.code == "incomplete_output"
        return "truncated"
    assert EOS not in ids[:end]
    gap = len(one.marks.gap) if reasons else 0
    assert tuple(ids[answer : answer + gap]) == one.marks.gap[:gap]
    text = tokenizer().decode(ids[answer + gap :])
    assert KINDS[one.row.kind].obeyed(text), (one.row, text)
    return "thought" if reasons else "direct"


def test_rows_alone_reason_and_then_follow_their_constraint() -> None:
    ran, found = alone(), Counter[str]()
    for one in work():
        found[check(one, ran.completions[one.request.key])] += 1
    assert found["thought"] > 3, found
    assert found["direct"] + found["truncated"] > 0, found
    (ended,) = (one for one in work() if (one.row.kind, one.row.wish) == ("regex", "greedy"))
    assert (
        locate_reasoning(ran.completions[ended.request.key].tokens.token_ids.tolist(), ended.marks).end
        == NATURAL
    )
    assert ran.requests[ended.request.key].forced_tokens >= len(GAP)


def test_the_batch_changes_nothing() -> None:
    """Rows whose reasoning has ended and that have no constraint allow look-ahead again."""
    limits = WAYS["preempted"]
    ran = run(looking_ahead(cpu_runner(limits)), limits)
    assert ran.answers == alone().answers
    assert ran.total("preemptions") > 0


def test_nothing_ends_an_answer_that_is_to_follow_a_constraint_yet() -> None:
    _, _, followed = guided_rows.constrained(cpu_runner(ALONE))
    for constraint, ends in ({"choice": ("yes",)}, False), ({"thinking_budget": 3}, True):
        params = SamplingParams(**constraint, after_reasoning=tuple(MARKS["opened"]))
        one, bits = followed.start(params), np.zeros((1, -(-VOCAB // 32)), np.int32)
        for token in (1, 2):
            followed.fill([one], bits)
            allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB]
            assert (one.allows(EOS), allowed[EOS]) == (ends, ends)
            assert allowed.sum() == VOCAB - 1 + ends
            one.take(token)


tokens = st.integers(0, 3)
markers = st.lists(tokens, min_size=1, max_size=3).map(tuple)


@given(
    st.lists(tokens, max_size=30),
    st.one_of(st.just(()), markers),
    markers,
    st.one_of(st.just(()), markers),
    st.one_of(st.none(), st.integers(0, 6)),
)
def test_the_engine_and_the_result_end_reasoning_at_the_same_token(
    wanted: list[int],
    begin: tuple[int, ...],
    end: tuple[int, ...],
    answer: tuple[int, ...],
    budget: int | None,
) -> None:
    """All tokens may follow the marker where the answer begins."""
    whole = (*end, *answer)
    earlier = [whole[at : at + len(answer)] for at in range(len(whole) - len(answer))]
    assume(not answer or answer not in earlier)  # else a part of the end that is forced ends the reasoning
    marks = ReasoningTokens(begin, whole, answer)
    one, ids = ReasonedConstraint(marks, None, FreeMasks(8, [7]), budget), list[int]()
    for token in wanted:
        forced = one.jump_forward()
        place, bits = forced[0] if forced else token, np.zeros(1, np.int32)
        one.write(bits)
        assert bits.tolist() == [1 << place if forced else 0xFF]
        assert one.allows(place)
        one.take(place)
        ids.append(place)
        assert one.over == (locate_reasoning(ids, marks).answer is not None), (ids, marks)
    found = locate_reasoning(ids, marks)
    assert budget is None or found.end - found.start <= budget
