"""Random work for engines: rows with any parameters and arrival times, and ways to split them into steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from batchinfer.core.request import Request
from tests.batchinfer.engine.small_engine import Limits, request

VOCAB = 9
TOKENS = st.integers(0, VOCAB - 1)
WINDOWS = st.sampled_from([(None,), (None,), (5,), (None, 3), (12, None, 1)])
EASY = Limits(budget=64, seqs=8, blocks=180, block_size=4)  # the rows fit without a preemption
# Choices for constrained rows; see `word_constraints`
WORDS = st.lists(st.text("bcd", min_size=1, max_size=7), min_size=1, max_size=5).map(tuple)


@dataclass(frozen=True)
class Work:
    """Rows and a way to split them into steps.

    Attributes:
        arrivals: number of the step before which each row arrives.
        windows: windows of the cache groups.
        nan_every: if not 0, one of this number of logit vectors is NaN.
        seed: seed of all other random choices.
    """

    limits: Limits
    rows: list[Request]
    arrivals: list[int]
    windows: tuple[int | None, ...]
    nan_every: int
    seed: int


@st.composite
def _requests(draw: Any, row: int, shared: list[int], constrained: bool) -> Request:
    prompt = shared[: draw(st.integers(0, len(shared)))] + draw(st.lists(TOKENS, min_size=1, max_size=9))
    words = draw(WORDS) if constrained and draw(st.integers(0, 3)) else ()
    most = draw(st.integers(3 if words else 0, 14))
    return request(
        row,
        prompt,
        most,
        choice=words,
        min_tokens=draw(st.integers(0, most)) if draw(st.booleans()) else 0,
        ignore_eos=draw(st.booleans()),
        stop=draw(st.sampled_from([(), (), ("there",)])),
        stop_token_ids=tuple(draw(st.lists(TOKENS, max_size=1))),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        logit_bias=draw(st.sampled_from([(), (), ((2, 3.0), (5, -100.0))])),
        allowed_token_ids=draw(st.sampled_from([(), (), (), (0, 1, 2, 3, 4, 8), (1, 2, 3)])),
        bad_tokens=draw(
            st.sampled_from([(), (), (), ((2,), (0,)), ((1, 2), (3,), (4, 4, 4), (5, 2), (7, 8))])
        ),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4])),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        repetition_stop=draw(st.sampled_from([0, 0, 4])),
    )


@st.composite
def works(draw: Any, may_constrain: bool = False) -> Work:
    """Draw rows, half of them under constraints if these are allowed.

    Rows under constraints have no NaN: a forced token needs no logits.
    """
    constrained = may_constrain and draw(st.booleans())
    shared = draw(st.lists(TOKENS, max_size=14))
    count, windows = draw(st.integers(1, 9)), draw(WINDOWS)
    limits = Limits(
        budget=draw(st.sampled_from([1, 3, 8, 40])),
        seqs=draw(st.integers(1, 6)),
        caching=draw(st.booleans()),
        blocks=draw(st.integers(10, 24)) * len(windows),
        block_size=4,
        scarce=draw(st.booleans()),
    )
    return Work(
        limits,
        [draw(_requests(row, shared, constrained)) for row in range(count)],
        sorted(draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))),
        windows,
        0 if constrained else draw(st.sampled_from([0, 0, 11])),
        draw(st.integers(0, 1 << 16)),
    )
