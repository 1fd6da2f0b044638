"""Tests constraints by llguidance with each kind of tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from batchinfer.core.request import ConstraintFailed, RowError
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.constrained import GrammarConstraint, GrammarConstraints
from batchinfer.input.constraints.grammar_tokenizer import grammar_problem
from batchinfer.input.prompts.prepare import CheckedConstraints
from tests.batchinfer.input.tokenizer.made_tokenizers import KINDS, UNREADABLE, byte_level, llama

MOST = 200
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a_name": {"enum": ["yes no", " yes", "no"]}, "n": {"type": "integer", "minimum": -20,
        "maximum": 300}, "s": {"type": "string", "maxLength": 4, "pattern": "^[a-c ]*$"}},
    "required": ["a_name", "n", "s"],
    "additionalProperties": False,
}  # fmt: skip
DECOMPOSED = "e\u0301tat"


@dataclass(frozen=True)
class Answer:
    """A generated answer, and whether it is complete."""

    ids: list[int]
    text: str
    whole: bool
    failure: RowError | None = None


def ends_of(tokenizer: Tokenizer, eos: tuple[int, ...]) -> tuple[int, ...]:
    known = tokenizer.get_vocab_size(with_added_tokens=True)
    return tuple(one for one in eos if one < known)


@cache
def constraints_of(definition: str, ends: tuple[int, ...], vocab: int) -> GrammarConstraints:
    return GrammarConstraints(definition, ends, vocab, 1)


def answer(
    tokenizer: Tokenizer, eos: tuple[int, ...], params: SamplingParams, seed: int, vocab: int = 400
) -> Answer:
    """Return the answer of a model that knows `vocab` tokens and picks any allowed one at random."""
    constraints = constraints_of(tokenizer.to_str(), ends_of(tokenizer, eos), vocab)
    rng, bits, ids = np.random.default_rng(seed), np.zeros((1, -(-vocab // 32)), np.int32), []
    constraint = constraints.start(params)
    failure = None
    try:
        while not constraint.ended and len(ids) < MOST:
            for token in (*constraint.jump_forward(), None):
                if constraint.ended:
                    break
                token = sampled(constraints, constraint, bits, rng) if token is None else token
                if token is None:
                    failure = constraint.failure
                    break
                constraint.take(token)
                ids.append(token)
            if failure:
                break
    except ConstraintFailed as failed:
        failure = failed.error
    assert all(token < vocab for token in ids)
    return Answer(ids, tokenizer.decode(ids, skip_special_tokens=True), constraint.ended, failure)


def sampled(
    constraints: GrammarConstraints, constraint: GrammarConstraint, bits: Any, rng: np.random.Generator
) -> int | None:
    bits[:] = -1
    constraints.fill([constraint], bits)
    allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return int(rng.choice(allowed)) if len(allowed) else None


def valid(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return json.dumps(json.loads(text)) == text


CONSTRAINTS: dict[str, tuple[SamplingParams, Callable[[str], Any]]] = {
    "schema": (SamplingParams(json_schema=json.dumps(SCHEMA)), valid),
    "regex": (SamplingParams(regex=" ?[a-c]{2,4} (yes|no)"), re.compile(" ?[a-c]{2,4} (yes|no)").fullmatch),
    "choice": (SamplingParams(choice=("yes", "no yes", " no")), {"yes", "no yes", " no"}.__contains__),
    "forced": (SamplingParams(choice=("state and no more",)), "state and no more".__eq__),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_decoded_follows_the_constraint(kind: str) -> None:
    make, eos = KINDS[kind]
    tokenizer = make()
    assert grammar_problem(tokenizer.to_str()) is None
    for params, check in CONSTRAINTS.values():
        for seed in range(3):
            found = answer(tokenizer, eos, params, seed)
            assert found.failure is None
            assert found.whole
            assert check(found.text), found.text


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_allowed_one_by_one_as_by_the_mask(kind: str) -> None:
    """If the mask is narrower than the grammar, no token is known to be allowed."""
    make, eos = KINDS[kind]
    tokenizer, rng, vocab = make(), np.random.default_rng(3), 400
    ends = ends_of(tokenizer, eos)
    constraints = constraints_of(tokenizer.to_str(), ends, vocab)
    bits = np.zeros((1, -(-vocab // 32)), np.int32)
    for name, (params, _) in CONSTRAINTS.items():
        state, known = constraints.start(params), 0
        while True:
            for token in state.jump_forward():
                state.take(token)
            if state.ended:
                break
            constraints.fill([state], bits)
            allowed = {*np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()}
            found = {token for token in range(vocab + 40) if state.allows(token)}
            assert found in (allowed, set())
            known += bool(found)
            state.take(int(rng.choice(sorted(allowed))))
        nowhere = name == "forced" or not ends or "Llama" in kind or "Metaspace" in kind
        assert known or nowhere, "no token is known to be allowed"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "Metaspace" not in kind])
def test_text_that_a_normalizer_would_change_is_written_as_it_is(kind: str) -> None:
    make, eos = KINDS[kind]
    found = answer(make(), eos, SamplingParams(choice=(DECOMPOSED,)), 0)
    assert (found.text, found.failure) == (DECOMPOSED, None)


@pytest.mark.parametrize("kind", ["bytes, no end", "Llama, no end", "bytes, no specials"])
def test_without_an_end_token_no_token_of_text_replaces_it(kind: str) -> None:
    """llguidance would use token 0, which would end answers and could not occur in text."""
    tokenizer = KINDS[kind][0]()
    open_ended = answer(tokenizer, (), SamplingParams(regex="[a-c!]*"), 1)
    assert (open_ended.whole, len(open_ended.ids)) == (False, MOST)
    assert {*open_ended.text} == {*"abc!"}
    assert answer(tokenizer, (), SamplingParams(regex="a!+b"), 1).text.startswith("a!")


def test_each_of_several_ends_ends_an_answer() -> None:
    tokenizer, ends = byte_level(), (259, 260, 261)
    found = [answer(tokenizer, ends, SamplingParams(regex="[ab]*"), seed).ids[-1] for seed in range(30)]
    assert {*found} == {*ends}


@pytest.mark.parametrize("beyond", [[], [262], [10**9]])
def test_an_end_token_may_be_outside_the_vocabulary(beyond: list[int]) -> None:
    found = [answer(byte_level(), (260, *beyond), SamplingParams(regex="x*"), seed) for seed in range(8)]
    assert {one.ids[-1] for one in found} == {260}


def test_a_mask_has_only_tokens_of_the_model() -> None:
    whole = answer(byte_level(), (260,), SamplingParams(choice=("yes yes",)), 0, vocab=262)
    assert whole.ids == [257, 258], "its longest tokens"
    for seed in range(4):
        free = answer(byte_level(), (260,), SamplingParams(regex="(yes|no){2}[a-z]{3}"), seed, vocab=230)
        if free.failure is None:
            assert re.fullmatch("(yes|no){2}[a-z]{3}", free.text)
        else:
            assert "no token of the model" in free.failure.message


def test_an_answer_that_has_to_begin_with_a_space_that_is_left_out_is_an_error() -> None:
    found = answer(llama(), (2,), SamplingParams(choice=(" yes", " no")), 0)
    assert "begin with a space" in found.failure.message
    kept = answer(KINDS["Gemma"][0](), (2,), SamplingParams(choice=(" yes", " no")), 0)
    assert kept.text in (" yes", " no")


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_tokenizer_that_cannot_be_read_is_refused(kind: str) -> None:
    definition = UNREADABLE[kind]().to_str()
    assert grammar_problem(definition) is not None
    checked = CheckedConstraints(SamplingParams(), definition)
    checked.check(SamplingParams())
    with pytest.raises(Exception, match="the tokenizer"):
        checked.check(SamplingParams(regex="a"))
