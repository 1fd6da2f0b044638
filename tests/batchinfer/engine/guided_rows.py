"""Runs rows with and without constraints together and checks each answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from batchinfer.core.request import Completion, Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.loop.drafting import Drafter
from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.input.constraints.constrained import GrammarConstraints, grammar_constraints
from batchinfer.input.tokenizer.stop_strings import stop_streams
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from tests.batchinfer.engine.small_engine import Limits, Ran, drain, following, make_engine
from tests.checkpoints import EOS, VOCAB, kept_folder, make_tokenizer

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["order", "question", "complaint"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "urgent": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,3}$"}, "maxItems": 2},
    },
    "required": ["kind", "count", "urgent", "tags"],
    "additionalProperties": False,
}
REGEX = "[a-f]{6,9}-[0-9]{2,4}"
CHOICES = ("yes", "no", "perhaps not")


def valid(text: str) -> bool:
    """Return True if the text is one line of JSON under SCHEMA."""
    import jsonschema  # which a machine that is only to be measured need not have

    jsonschema.validate(json.loads(text), SCHEMA)
    return json.dumps(json.loads(text)) == text


@dataclass(frozen=True)
class Kind:
    """A kind of constraint, and a check of texts."""

    params: Mapping[str, Any]
    obeyed: Callable[[str], Any]


KINDS = {
    "schema": Kind({"json_schema": json.dumps(SCHEMA)}, valid),
    "regex": Kind({"regex": REGEX}, re.compile(REGEX).fullmatch),
    "choice": Kind({"choice": CHOICES}, CHOICES.__contains__),
    "grammar": Kind({"grammar": 'start: "a" ("," /[b-d]/)~3..6'}, re.compile("a(,[b-d]){3,6}").fullmatch),
    "free": Kind({"max_tokens": 40}, lambda _: True),
}
# Other parameters of rows
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.3, "top_p": 0.95},
    "penalised": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
    },
    "min_tokens": {"min_tokens": 30},
    "stops": {"temperature": 1.0, "stop": ("e", "-2", ",c")},
    "logprobs": {"temperature": 1.0, "logprobs": 2},
    "confidence": {"temperature": 1.0, "confidence": True},
    "cut": {"max_tokens": 9},
    "biased": {"logit_bias": ((64, 4.0), (68, -100.0))},
    "narrowed": {"allowed_token_ids": (*range(256), EOS)},
    "worded": {"bad_tokens": ((65,), (1, 4), (64, 64)), "temperature": 1.0},
}


@dataclass(frozen=True)
class Row:
    """A request with the kind and the content of its constraint."""

    kind: str
    wish: str
    request: Request


@cache
def tokenizer() -> Tokenizer:
    folder = kept_folder()
    make_tokenizer(folder)
    return Tokenizer.load(folder)


def rows(kinds: Seq[str] = tuple(KINDS), wishes: Seq[str] = tuple(WISHES)) -> list[Row]:
    """Return a row per pair of kind and wish, in a mixed order."""
    return [row for row in _rows() if row.kind in kinds and row.wish in wishes]


@cache
def _rows() -> list[Row]:
    """Return the rows; the prompts of two in three share a prefix."""
    rng = np.random.default_rng(3)
    shared, made = rng.integers(0, 256, 40), []
    for number, (kind, wish) in enumerate((kind, wish) for wish in WISHES for kind in KINDS):
        own = rng.integers(0, 256, 1 + number % 5)
        prompt = np.append(shared if number % 3 else shared[:0], own).astype(np.int32)
        params = SamplingParams(**{"max_tokens": 80, **KINDS[kind].params, **WISHES[wish]})
        made.append(Row(kind, wish, Request(rng.bytes(32), prompt, params)))
    return made


def constrained(runner: Any, on_host: bool = False) -> tuple[Any, ConstraintMasks, GrammarConstraints]:
    """Return the runner with constraints, its masks and its constraints."""
    followed = grammar_constraints(tokenizer())(frozenset([EOS]), VOCAB)
    return *following(runner, followed, on_host), followed


def run(runner: Any, limits: Limits, work: Seq[Row], drafter: Drafter | None = None) -> Ran:
    """Run the rows with their constraints.

    As on a CPU, a runner without look-ahead checks its tokens on the host. A sequence that runs alone always
    gets its mask.
    """
    runner, masks, _ = constrained(runner, on_host=not runner.looks_ahead and limits.seqs > 1)
    streams = stop_streams(tokenizer().rust)
    engine = make_engine(runner, limits, frozenset([EOS]), stop_streams=streams, masks=masks, drafter=drafter)
    return drain(engine, [row.request for row in work])


def text_of(completion: Completion) -> str:
    return tokenizer().decode(completion.tokens.token_ids)[: completion.tokens.text_length]


def check(row: Row, completion: Completion) -> bool:
    """Return True if the answer is complete, after checking it against its constraint or its limits."""
    params, text, error = row.request.params, text_of(completion), completion.error
    assert (completion.tokens.logprobs is not None) == params.asks_logprobs
    assert not any(stop in text for stop in params.stop)
    if row.kind == "free":
        assert error is None
        assert len(completion.tokens.token_ids) >= min(params.min_tokens, params.max_tokens)
        return completion.finish_reason == "stop"
    if error is None:
        assert completion.finish_reason == "stop"
        assert completion.tokens.text_length is None
        assert KINDS[row.kind].obeyed(text), (row.kind, row.wish, text)
        return True
    assert error.code == "incomplete_output", error
    assert completion.tokens.text_length is not None or len(completion.tokens.token_ids) == params.max_tokens
    return False
