"""Finding the reasoning tokens of an answer, for any tokens and markers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.reasoning import NO_REASONING, ReasoningTokens, find, locate_reasoning

tokens = st.integers(0, 3)
marks = st.lists(tokens, min_size=1, max_size=3).map(tuple)


@st.composite
def reasonings(draw: st.DrawFn) -> ReasoningTokens:
    """Draw markers that may share a beginning or contain each other. An answer's header ends the marker before it."""
    begin, end = draw(st.one_of(st.just(()), marks)), draw(marks)
    answer = draw(st.one_of(st.just(()), marks))
    return ReasoningTokens(begin, (*end, *answer), answer)


@given(st.lists(tokens, max_size=20), reasonings())
def test_the_split_of_an_answer_is_within_its_tokens(ids: list[int], given: ReasoningTokens) -> None:
    start, end, answer, reasons = locate_reasoning(ids, given)
    assert 0 <= start <= end <= len(ids)
    assert answer is None or end <= answer <= len(ids)
    assert reasons or start == end == 0
    if not reasons and not given.answer:
        assert answer == 0
    if reasons and answer is not None:
        assert tuple(ids[answer - len(given.closing) : answer]) == given.closing
        assert find(ids[start : answer - 1], given.closing) < 0  # the first closing marker
    if reasons and given.begin and answer is not None:
        assert tuple(ids[:start]) == given.begin


@given(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 12)), st.booleans())
def test_text_between_markers_is_reasoning(inside: list[int], behind: list[int], opened: bool) -> None:
    given = ReasoningTokens(() if opened else (11,), (10,))
    start = 0 if opened else 1
    ids = [*([] if opened else [11]), *inside, 10, *behind]
    end = start + len(inside)
    assert locate_reasoning(ids, given) == (start, end, end + 1, True)
    assert locate_reasoning(ids[:end], given)[:2] == ((start, end) if ids[:start] or opened else (0, 0))


def test_an_answer_may_do_without_reasoning() -> None:
    given = ReasoningTokens((5, 6), (7, 8, 9), (8, 9))
    assert locate_reasoning([1, 5, 6, 2], given) == NO_REASONING
    assert locate_reasoning([8, 9, 5, 6], given) == (0, 0, 2, False)  # the answer starts with its header
    assert locate_reasoning([5], given) == (1, 1, None, True)  # the answer ended within its opening marker


def test_a_marker_that_is_not_whole_is_no_reasoning() -> None:
    given = ReasoningTokens((5, 6), (7, 8, 9), (8, 9))
    assert locate_reasoning([5, 6, 1, 7, 8], given) == (2, 3, None, True)
    assert locate_reasoning([5, 6, 1, 8, 9, 2], given) == (2, 3, 5, True)  # the header is enough to end it
    assert locate_reasoning([5, 6, 1, 7, 8, 9, 2], given) == (2, 3, 6, True)
