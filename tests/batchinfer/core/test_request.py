from __future__ import annotations

import pickle
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from batchinfer.core.request import (
    Completion,
    Request,
    RowError,
    TokenLogprobs,
    Tokens,
    Vector,
    common_prefixes,
)
from batchinfer.core.samples import RequestSample
from batchinfer.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class WithMadeUpOption(SamplingParams):
    """Sampling parameters of a later version, with one more field."""

    made_up: int = 3


GIVEN: list[dict[str, Any]] = [
    {},
    {"max_tokens": 8, "stop": ("x",), "stop_token_ids": (7,)},
    {"temperature": 0.7, "top_p": 0.9, "seed": 5},
    {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": -0.5, "ignore_eos": True},
]


@pytest.mark.parametrize("given", GIVEN)
def test_an_option_that_is_added_later_changes_no_text(given: dict[str, Any]) -> None:
    later = WithMadeUpOption(**given).canonical().to_json()
    assert later == SamplingParams(**given).canonical().to_json()
    assert WithMadeUpOption.from_json(later) == WithMadeUpOption(**given).canonical(), "read by that version"
    assert WithMadeUpOption(**given, made_up=4).canonical().to_json() != later


def test_the_defaults_stay() -> None:
    """A stored text leaves defaults out: a changed default would change its meaning but not its key."""
    constraints = ("json_schema", "regex", "grammar", "tool_call")
    none = (*constraints, "logprobs", "prompt_logprobs", "thinking_budget", "pooling")
    empty = ("stop", "stop_token_ids", "choice", "logit_bias", "allowed_token_ids", "bad_words", "bad_tokens")
    false = ("ignore_eos", "json_object", "include_stop", "classified", "confidence")
    zero = ("min_tokens", "temperature", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty")
    # a new parameter is added here; one that is here never changes
    assert {f.name: f.default for f in fields(SamplingParams)} == {
        **dict.fromkeys(none),
        **dict.fromkeys((*empty, "after_reasoning", "scored"), ()),
        **dict.fromkeys(false, False),
        **dict.fromkeys((*zero, "repetition_stop", "second_segment"), 0),
        **dict.fromkeys(("top_p", "repetition_penalty"), 1.0),
        **{"max_tokens": 256, "adapter": ""},
    }


@pytest.mark.parametrize(("params", "text"), [
    (SamplingParams(), "{}"),
    (SamplingParams(temperature=-0.0, seed=7, top_k=5), "{}"),
    (SamplingParams(include_stop=True), "{}"),
    (SamplingParams(logit_bias=((5, 0.0),)), "{}"),
    (SamplingParams(logit_bias=((7, 1.5), (3, -100.0))), '{"logit_bias":[[3,-100.0],[7,1.5]]}'),
    (SamplingParams(include_stop=True, stop=("a",)), '{"include_stop":true,"stop":["a"]}'),
    (SamplingParams(temperature=0.5, seed=7), '{"seed":7,"temperature":0.5}'),
    (SamplingParams(stop=("b", "a", "b"), stop_token_ids=(9, 2)), '{"stop":["a","b"],"stop_token_ids":[2,9]}'),
    (SamplingParams(max_tokens=9, frequency_penalty=0.5), '{"frequency_penalty":0.5,"max_tokens":9}'),
])  # fmt: skip
def test_equal_answers_have_one_spelling(params: SamplingParams, text: str) -> None:
    assert params.canonical().to_json() == text
    assert SamplingParams.from_json(text) == params.canonical()


def test_a_request_for_a_vector_says_so_and_nothing_else() -> None:
    params = SamplingParams.vector("last")
    assert params.canonical().to_json() == '{"max_tokens":0,"pooling":"last"}'
    pair = SamplingParams.logits("cls", 5).canonical().to_json()
    assert pair == '{"classified":true,"max_tokens":0,"pooling":"cls","second_segment":5}'
    assert SamplingParams.scores((2, 1)).canonical().to_json() == '{"max_tokens":0,"scored":[2,1]}'
    assert params.has_known_length


def test_each_constraint_has_its_digest() -> None:
    params = [
        SamplingParams(),
        SamplingParams(regex="a"),
        SamplingParams(regex="\ud83d"),
        SamplingParams(grammar="a"),
        SamplingParams(choice=("a",)),
        SamplingParams(choice=("a", "b")),
        SamplingParams(choice=("a, b",)),
        SamplingParams(json_object=True),
    ]
    assert len({one.constraint_digest for one in params}) == len(params)
    assert SamplingParams(regex="a", temperature=1.0).constraint_digest == params[1].constraint_digest


IDS = np.array([5, 3, 2**31 - 1], np.int32)
LOGPROBS = TokenLogprobs(np.ones(3, np.float32), np.ones((3, 1), np.float32), IDS[:, None])
ERROR = RowError("engine_died", "engine", "words", True)


@pytest.mark.parametrize(
    "sent",
    [
        Request(b"k" * 32, IDS, SamplingParams(max_tokens=3), 2),
        Request(b"k" * 32, IDS[::2], SamplingParams()),
        Completion(b"k" * 32, Tokens(IDS, 7, LOGPROBS), "stop", ERROR),
        Completion(b"k" * 32, Tokens(IDS[:0]), "error"),
        Completion(b"k" * 32, Vector(np.arange(3, dtype=np.float32)), "stop"),
        RequestSample(b"k" * 32, 1, 2, 3, 4, 0.5, 0.6, 0.7, 0.8, True, True, 9),
    ],
    ids=lambda sent: type(sent).__name__,
)
def test_pickling_keeps_every_field(sent: Any) -> None:
    """Pickling is written by hand, per field: a new field must be pickled, too."""
    check_same(pickle.loads(pickle.dumps(sent)), sent)


def check_same(got: Any, sent: Any) -> None:
    assert type(got) is type(sent)
    for field in fields(sent):
        mine, theirs = getattr(sent, field.name), getattr(got, field.name)
        if isinstance(mine, np.ndarray):
            assert (theirs.dtype, theirs.flags.writeable) == (mine.dtype, True)
            np.testing.assert_array_equal(theirs, mine)
        elif isinstance(mine, Tokens | Vector):
            check_same(theirs, mine)
        elif isinstance(mine, TokenLogprobs):
            np.testing.assert_array_equal(theirs.top_ids, mine.top_ids)
        else:
            assert theirs == mine, field.name


prompts_of_runs = st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 12)), max_size=4), max_size=8)


@for_all(prompts_of_runs)
def test_neighbours_share_their_common_prefix(runs: list[list[tuple[int, int]]]) -> None:
    prompts = [[token for token, times in run for _ in range(times)] for run in runs]
    found = common_prefixes([np.array(prompt, np.int32) for prompt in prompts])
    assert len(found) == max(0, len(prompts) - 1)
    for common, one, other in zip(found, prompts, prompts[1:], strict=False):
        assert one[:common] == other[:common]
        assert common in (len(one), len(other)) or one[common] != other[common]
