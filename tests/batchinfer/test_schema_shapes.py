"""Tests answers of random weights under schemas with each feature: all are valid and fit their columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from typing import Any
from uuid import UUID

import jsonschema
import numpy as np
import pyarrow as pa
import pytest

from batchinfer.core.request import Completion, ConstraintFailed, Request, Tokens
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.constrained import GrammarConstraint, GrammarConstraints
from batchinfer.input.constraints.constraint_check import constraint_problem
from batchinfer.input.constraints.grammar import BadConstraint, check_grammar
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.store.columns.answer_check import AnswerCheck, parse_answer
from batchinfer.store.columns.schema_columns import NoColumns, SchemaColumns, schema_columns
from tests.batchinfer.engine.small_engine import (
    Limits,
    Ran,
    checkpoint,
    cpu_ops,
    drain,
    following,
    make_engine,
    make_runner,
)
from tests.batchinfer.schema_shapes import EDGES, REFUSED, SHAPES, matching
from tests.checkpoints import EOS, VOCAB, kept_folder, make_tokenizer
from tests.examples import first_of

MOST = 250  # tokens of an answer; texts without a bound are truncated more often than not
LIMITS = Limits(budget=256, seqs=64, blocks=64 * 40, block_size=8)


@cache
def tokenizer() -> Tokenizer:
    folder = kept_folder()
    make_tokenizer(folder)
    return Tokenizer.load(folder)


def columns_of(schema: Mapping[str, Any]) -> SchemaColumns:
    try:
        return schema_columns(schema)
    except NoColumns:
        return schema_columns(schema, "answer")


def run(requests: list[Request], limits: Limits = LIMITS) -> Ran:
    """Run requests on a model of one layer with random weights."""
    constraints = GrammarConstraints(tokenizer().definition, [EOS], VOCAB, 1)
    model = checkpoint("llama", num_hidden_layers=1)
    runner = make_runner(model, cpu_ops(model), limits)
    runner, masks = following(runner, constraints)
    engine = make_engine(runner, limits, frozenset([EOS]), masks=masks)
    return drain(engine, requests)


def answers(schemas: Mapping[str, Any], each: int, most: int = MOST) -> dict[str, list[Completion]]:
    """Return `each` answers under every schema, all in the same batches; half of them tend to close brackets
    early."""
    closers = tuple(tokenizer().rust.encode('"]},', add_special_tokens=False).ids)
    requests, of = [], {}
    for number, (name, schema) in enumerate(schemas.items()):
        rng = np.random.default_rng(number)
        for turn in range(each):
            params = SamplingParams(
                max_tokens=most,
                temperature=float(rng.choice([0.7, 1.5, 4.0])),
                seed=turn,
                frequency_penalty=float(rng.choice([0.0, 0.3])),
                json_schema=json.dumps(schema),
            )
            key, prompt = rng.bytes(32), rng.integers(0, 256, 6).astype(np.int32)
            requests.append(Request(key, np.append(prompt, closers[turn % 4]).astype(np.int32), params))
            of[key] = name
    found: dict[str, list[Completion]] = {name: [] for name in schemas}
    for key, completion in run(requests).completions.items():
        found[of[key]].append(completion)
    return found


def check(name: str, schema: Mapping[str, Any], completions: list[Completion]) -> int:
    """Return the number of complete answers, after checking them against the schema and the columns."""
    columns = columns_of(schema)
    validator = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    checked = AnswerCheck(columns, tokenizer()).check_all(completions)
    whole = [completion for completion in checked if completion.error is None]
    codes = {completion.error.code for completion in checked if completion.error is not None}
    assert codes <= {"incomplete_output", "unfit_output"}, (name, codes)
    texts = tokenizer().decode_batch([completion.tokens.token_ids.tolist() for completion in whole])
    for said in texts:
        wrong = [error.message for error in validator.iter_errors(json.loads(said))]
        assert not wrong, (name, said, wrong)
    values = [parse_answer(said) for said in texts]
    arrays = columns.arrays(values)
    rows = pa.table(arrays, schema=columns.schema).to_pylist()
    for row, value in zip(rows, values, strict=True):
        held = {columns.column: value} if columns.column is not None else value
        for field in columns.schema:
            assert same(field.type, row[field.name], held.get(field.name)), (name, field, row, value)
    return len(whole)


def same(kind: pa.DataType, held: Any, said: Any) -> bool:
    """Return True if a column's value equals the answer's JSON value."""
    if said is None:
        return held is None or (pa.types.is_string(kind) and held == "null")
    if pa.types.is_struct(kind):
        return all(same(field.type, held[field.name], said.get(field.name)) for field in kind)
    if pa.types.is_list(kind):
        return len(held) == len(said) and all(
            same(kind.value_type, one, other) for one, other in zip(held, said, strict=True)
        )
    if pa.types.is_date32(kind):
        return bool(held == date.fromisoformat(said))
    if pa.types.is_timestamp(kind):
        return bool(held == datetime.fromisoformat(said.upper()).astimezone(UTC))
    if pa.types.is_time64(kind):
        return bool(held == in_utc(time.fromisoformat(said.upper())))
    if kind == pa.uuid():
        return bool(held == UUID(said))
    if pa.types.is_floating(kind):
        return bool(held == float(said))
    if pa.types.is_string(kind) and not isinstance(said, str):
        return bool(parse_answer(held) == said)
    return bool(held == said) or (pa.types.is_string(kind) and parse_answer(held) == said)


def in_utc(said: time) -> time:
    offset = said.utcoffset() or timedelta()
    return (datetime.combine(date(2000, 1, 2), said.replace(tzinfo=None)) - offset).time()


def test_complete_answers_are_valid_and_equal_their_columns() -> None:
    """A small part of the sweep below."""
    schemas = {**SHAPES, **EDGES}
    for name, completions in answers(schemas, 1, 120).items():
        check(name, schemas[name], completions)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHAPES, *EDGES])
def test_a_thousand_answers_of_each_schema(name: str) -> None:
    schema = {**SHAPES, **EDGES}[name]
    (completions,) = answers({name: schema}, 1000).values()
    whole = check(name, schema, completions)
    assert whole >= 50, f"{whole} of 1,000 answers were whole"


@pytest.mark.parametrize("name", REFUSED)
def test_schemas_that_cannot_be_followed_exactly_are_refused(name: str) -> None:
    schema, words = REFUSED[name]
    with pytest.raises(BadConstraint, match=words):
        check_grammar(SamplingParams(json_schema=json.dumps(schema)))


def test_a_number_with_an_exponent_beyond_reading_is_an_error_row() -> None:
    said = '{"c": 1E76462001328355758549582901273959}'
    ids = np.array(tokenizer().rust.encode(said, add_special_tokens=False).ids, np.int32)
    columns = schema_columns({"properties": {"c": {"type": "number"}}})
    (found,) = AnswerCheck(columns, tokenizer()).check_all([Completion(bytes(32), Tokens(ids), "stop")])
    assert found.error is not None
    assert found.error.code == "unfit_output"


def test_forced_tokens_prefix_reuse_and_preemption_together_keep_answers_valid() -> None:
    """With log-probabilities and min_tokens, and with too little memory for all rows at once."""
    schema, rng = SHAPES["nested"], np.random.default_rng(5)
    shared = rng.integers(0, 256, 40).astype(np.int32)
    requests = [
        Request(
            rng.bytes(32),
            np.append(shared, turn).astype(np.int32),
            SamplingParams(
                max_tokens=MOST,
                temperature=2.0,
                seed=turn,
                min_tokens=100,
                repetition_penalty=1.1,
                logprobs=2 if turn % 3 == 0 else None,
                json_schema=json.dumps(schema),
            ),
        )
        for turn in range(16)
    ]
    ran = run(requests, Limits(budget=64, seqs=16, blocks=60, block_size=8, scarce=True))
    assert check("nested", schema, list(ran.completions.values())) >= 8
    assert sum(step.preemptions for step in ran.steps) > 0
    assert sum(step.cached_tokens for step in ran.steps) > 0
    assert sum(step.forced_tokens for step in ran.steps) > 0
    assert all(
        (ran.completions[r.key].tokens.logprobs is None) == (r.params.logprobs is None) for r in requests
    )


def take_often(constraint: GrammarConstraint, token: int) -> None:
    for _ in range(300):
        constraint.take(token)


@pytest.mark.parametrize(
    ("grammar", "char"), [('start: a\na: a a | "x" |', "x"), ('root ::= root root | "a"?', "a")]
)
def test_an_ambiguous_grammar_fails_before_it_slows_the_batch(grammar: str, char: str) -> None:
    """Each token costs more than the one before."""
    constraints = GrammarConstraints(tokenizer().definition, [EOS], VOCAB, 1)
    constraint = constraints.start(SamplingParams(grammar=grammar))
    (token,) = tokenizer().rust.encode(char, add_special_tokens=False).ids
    with pytest.raises(ConstraintFailed, match="cannot be followed"):
        take_often(constraint, token)


CHAIN = {f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "string"}]} for i in range(8000)}
HOSTILE: dict[str, Any] = {
    "alternatives that name one another": {"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d8000": {"type": "null"}}},
    "classes without an end": matching('[^"' * 40_000),
    "alternatives of alternatives": {"enum": list(range(100_000))},
}  # fmt: skip


@pytest.mark.parametrize("name", first_of(sorted(HOSTILE, key="classes without an end".__ne__), 1))
def test_a_hostile_schema_is_refused_before_time_is_up(name: str) -> None:
    problem = constraint_problem(SamplingParams(json_schema=json.dumps(HOSTILE[name])), within_s=60)
    assert problem is not None
    assert "takes longer" not in problem
