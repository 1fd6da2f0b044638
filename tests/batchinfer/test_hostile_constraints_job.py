"""Tests rows whose constraints crash, hang or fill the processes that compile and follow them."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tokenizers

from batchinfer.core.request import ConstraintFailed
from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.constrained import GrammarConstraints
from batchinfer.input.constraints.constraint_check import ConstraintChecker, constraint_problem
from batchinfer.input.constraints.grammar import compile_constraint
from batchinfer.input.constraints.grammar_tokenizer import GrammarTokenizer
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from tests.batchinfer.test_structured_job import REAL
from tests.batchinfer.wrong_jobs import CliOf, Command, Place
from tests.checkpoints import EOS, kept_folder, make_tokenizer


@pytest.fixture
def run(cli_of: CliOf) -> Command:
    return cli_of(REAL)


@pytest.fixture(scope="module")
def definition() -> str:
    folder = kept_folder()
    make_tokenizer(folder)
    return Tokenizer.load(folder).definition


def rules(count: int) -> str:
    """Return a grammar of `count` rules that each need the next."""
    return "\n".join(["start: r0", *(f'r{n}: "a" r{n + 1}' for n in range(count)), f'r{count}: "x"'])


def references(count: int) -> dict[str, Any]:
    """Return a schema with a chain of `count` references."""
    chain = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "boolean"}}}


# With the tokenizer, compiling it takes minutes; without, 0.3 s.
SLOW = SamplingParams(regex="a?" * 100_000)


@pytest.mark.slow
def test_a_row_with_a_hostile_constraint_costs_that_row(place: Place, run: Command) -> None:
    rows: list[dict[str, Any]] = [
        {"id": "free"},
        {"id": "rules", "grammar": rules(9_000)},
        {"id": "references", "json_schema": references(8_000)},
        {"id": "slow", "regex": SLOW.regex},
        {"id": "after", "choice": ["yes", "no"]},
        {"id": "deep enough", "json_schema": references(200)},
        {"id": "many", "choice": [f"number {n}" for n in range(5_000)]},
    ]
    place.rows(*({"text": "t", **row} for row in rows))
    place.job(
        "on_error: {max_error_rate: 1.0}",
        sampling="sampling: {max_tokens: 60, temperature: 1, from_columns: [regex, choice, grammar, json_schema]}",
    )
    done = run("run", place.folder / "job.yaml")
    assert done.code == 0, done.err
    found = {row["custom_id"]: row for row in place.table()}
    bad = {name: row for name, row in found.items() if row["error_code"] is not None}
    assert {name: row["error_code"] for name, row in bad.items()} == dict.fromkeys(
        ["rules", "references", "slow"], "bad_constraint"
    )
    assert "lead too deep" in bad["rules"]["error_message"]
    assert "lead too deep" in bad["references"]["error_message"]
    assert "make it simpler" in bad["slow"]["error_message"], "it ran out of time, or of memory"
    assert found["after"]["generated_text"] in ("yes", "no")
    assert found["deep enough"]["generated_text"] in ("true", "false")
    assert found["many"]["generated_text"].startswith("number ")


@pytest.mark.slow
def test_many_hostile_rows_after_one_another_are_no_mistake_of_the_job(place: Place, run: Command) -> None:
    """Unlike a template that hangs in every row."""
    place.rows(*({"id": f"r{n}", "text": "t", "grammar": rules(9_000 + n)} for n in range(10)))
    place.job("on_error: {max_error_rate: 1.0}", sampling="sampling: {from_columns: [grammar]}")
    done = run("run", place.folder / "job.yaml")
    assert done.code == 0, done.err
    assert [row["error_code"] for row in place.table()] == ["bad_constraint"] * 10


def test_a_checker_restarts_after_a_constraint_that_ended_it(definition: str) -> None:
    with ConstraintChecker(definition, within_s=0.5) as checker:
        assert checker.problem(SamplingParams()) is None
        assert checker.problem(SamplingParams(regex="a+")) is None
        for hostile in (SamplingParams(grammar=rules(9_000)), SLOW):
            assert checker.problem(hostile) is not None
            assert checker.problem(SamplingParams(regex="a+")) is None
        assert "is not closed" in (checker.problem(SamplingParams(regex="(a")) or "")


def test_a_constraint_that_is_slow_on_a_busy_machine_is_accepted() -> None:
    """The limit is on CPU time without the start of the process and its libraries."""
    assert constraint_problem(SamplingParams(json_schema=json.dumps(references(50))), within_s=0.2) is None


def test_accepted_constraints_compile_on_the_stack_of_the_engine(definition: str) -> None:
    """The deepest chains that the check accepts."""
    tokenizer = GrammarTokenizer.of(definition, (), 10**6).library
    with ConstraintChecker(definition) as checker:
        for make in (
            lambda count: SamplingParams(grammar=rules(count)),
            lambda count: SamplingParams(json_schema=json.dumps(references(count))),
        ):
            count = next(n for n in (1_600, 800, 400, 200, 0) if checker.problem(make(n)) is None)
            assert count >= 200
            assert not compile_constraint(make(count), tokenizer).is_error()


def test_rows_with_expensive_grammars_fail_and_other_rows_continue(definition: str) -> None:
    """Measured with 49,152 tokens: 64 such rows cost up to 0.6 s of CPU time per step for masks and 0.8 s to
    take tokens, until each has failed."""
    constraints = GrammarConstraints(definition, [EOS], 300, 1)
    rows = [constraints.start(SamplingParams(grammar='start: a\na: a a | "x" |')) for _ in range(2)]
    other = constraints.start(SamplingParams(regex="x+"))
    (x,) = tokenizers.Tokenizer.from_str(definition).encode("x", add_special_tokens=False).ids
    bits = np.zeros((3, 10), np.int32)
    for _ in range(300):
        constraints.fill([*rows, other], bits)
        if all(row.failure for row in rows):
            break
        for one in [*(row for row in rows if not row.failure), other]:
            with suppress(ConstraintFailed):
                one.take(x)
    errors = [row.failure for row in rows]
    assert {error.code for error in errors if error is not None} == {"constraint_failed"}
    assert None not in errors
    assert other.failure is None
    constraints.fill([*rows, other], bits)
    assert not bits[:2].any()
    assert allowed(bits[2]) == {x, EOS}


def allowed(row: np.ndarray) -> set[int]:
    return {token for token in range(300) if row[token // 32] >> (token % 32) & 1}
