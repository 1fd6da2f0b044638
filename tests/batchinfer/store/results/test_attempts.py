"""The attempt of a row that counts, and its next one, compared with a plain reading of the store."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Completion, FinishReason, RowError
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.planner import plan_job
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.index.index import Index, attempt_columns
from batchinfer.store.results.error_summary import summarise_all_errors
from batchinfer.store.results.join import Join, join_answers
from tests.batchinfer.store.small_index import (
    PARAMS,
    answer,
    bad_row,
    good_row,
    key_of,
    write_index,
)
from tests.examples import examples

ATTEMPTS = 4
INVALID = ("length", "repetition", "incomplete_output", "unfit_output", "constraint_failed")
OTHERS = ("engine_died", "nan_logits")  # errors; the second one is retryable
WORK = [([n, 1, 2], 8 + n) for n in range(6)]  # prompt and max_tokens of each work, which rows may share
Row = tuple[int, tuple[int | None, ...]] | None  # work of the first and of later attempts; None: an error row
Outcomes = dict[int, str]  # by stored work

rows = st.none() | st.tuples(st.integers(0, 5), st.tuples(*[st.none() | st.integers(0, 5)] * (ATTEMPTS - 1)))
outcomes = st.dictionaries(st.integers(0, 5), st.sampled_from(["stop", *INVALID, *OTHERS]))


def index_of(folder: Path, given: list[Row]) -> Index:
    made: list[dict[str, Any]] = []
    for number, row in enumerate(given):
        if row is None:
            made.append(bad_row(number))
            continue
        values = good_row(number, *WORK[row[0]])
        for attempt, work in enumerate(row[1], 2):
            if work is not None:
                key, params, expected = attempt_columns(attempt)
                values |= {key: key_of(*WORK[work]), params: PARAMS, expected: WORK[work][1]}
        made.append(values)
    return write_index(folder / "x", made, rows_per_part=3, attempts=ATTEMPTS)


def completion(work: int, outcome: str) -> Completion:
    key = key_of(*WORK[work])
    if outcome in ("stop", "length", "repetition"):
        reason: FinishReason = outcome  # type: ignore[assignment]
        return Completion(key, answer(key).output, reason)
    error = RowError(outcome, "policy", "", retryable=outcome == "nan_logits")
    return Completion(key, answer(key).output, "error", error)


def walked(
    row: tuple[int, tuple[int | None, ...]], stored: Outcomes
) -> tuple[list[tuple[int, int]], int | None]:
    """Return the finished attempts of a row with their work, and the work of its next attempt."""
    made: list[tuple[int, int]] = []
    for attempt, work in enumerate([row[0], *row[1]], 1):
        if work is None:
            continue
        if work not in stored:
            return made, work
        made.append((attempt, work))
        if stored[work] not in INVALID:
            break
    return made, None


def counting(made: list[tuple[int, int]], stored: Outcomes) -> tuple[int, int]:
    if stored[made[-1][1]] == "stop":
        return made[-1]
    answers = [one for one in made if stored[one[1]] in ("length", "repetition")]
    return (answers or made)[-1]


def check_join(join: Join, given: list[Row], stored: Outcomes, places: dict[int, int]) -> None:
    finished: dict[int, tuple[int, int]] = {}
    used: set[int] = set()
    for number, row in enumerate(given):
        made, due = ([], None) if row is None else walked(row, stored)
        if due is None and made:
            finished[number] = counting(made, stored)
        used.update(places[work] for _, work in made)
    assert dict(zip(join.rows.tolist(), join.positions.tolist(), strict=True)) == {
        number: places[work] for number, (_, work) in finished.items()
    }
    if join.attempts is not None:
        assert {number: join.attempts[number] for number in finished} == {
            number: attempt for number, (attempt, _) in finished.items()
        }
    failed = [
        number
        for number, (_, work) in finished.items()
        if stored[work] not in ("stop", "length", "repetition")
    ]
    assert join.counts.engine_errors == len(failed)
    got = {number for _, numbers in join.used() for number in numbers.tolist()}
    assert {*join.positions.tolist()} <= got <= used
    assert all(places[work] in got for number in finished for _, work in walked(given[number], stored)[0])  # type: ignore[arg-type]


def check_plan(plan: Plan, given: list[Row], stored: Outcomes) -> None:
    due = [walked(row, stored)[1] for row in given if row is not None]
    wanted = {work for work in due if work is not None}
    planned = pq.read_table(plan.path).to_pylist()
    assert {row["key"] for row in planned} == {key_of(*WORK[work]) for work in wanted}
    assert {row["key"]: row["users"] for row in planned} == {
        key_of(*WORK[work]): due.count(work) for work in wanted
    }
    last = [walked(row, stored)[1] for row in given if row is not None and is_last(row, stored)]
    assert {row["key"]: row["final_users"] for row in planned} == {
        key_of(*WORK[work]): last.count(work) for work in wanted
    }
    assert plan.rows == len(given)
    assert plan.error_rows + plan.distinct + plan.duplicates == plan.rows
    assert plan.distinct == plan.present + plan.to_run


def is_last(row: tuple[int, tuple[int | None, ...]], stored: Outcomes) -> bool:
    """Return True if the next attempt of a row is its last one."""
    made, _ = walked(row, stored)
    works = [work for work in [row[0], *row[1]] if work is not None]
    return len(made) == len(works) - 1


@settings(max_examples=examples(4, 300), deadline=None)
@given(st.lists(rows, min_size=8, max_size=24), outcomes)
def test_the_store_says_which_attempt_counts_and_which_is_next(given: list[Row], stored: Outcomes) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        index = index_of(folder, given)
        with CompletionStore(folder / "completions") as store:
            store.append(completion(work, outcome) for work, outcome in stored.items())
            store.commit()
            places = {work: place for place, work in enumerate(stored)}
            join = join_answers(index.index_parts, store.parts(), folder / "join", attempts=ATTEMPTS)
            check_join(join, given, stored, places)
            roots, where = ContentRoots(1 << 20), folder / "plan"
            plan = plan_job(index.index_parts, index.tokens, store.parts(), where, roots, attempts=ATTEMPTS)
            check_plan(plan, given, stored)
            errors = summarise_all_errors(index.index_parts, store.parts(), folder / "errors", ATTEMPTS)
            assert errors.rows == join.counts.errors
