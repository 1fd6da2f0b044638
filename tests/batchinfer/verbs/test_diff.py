"""`batchinfer diff`: differences between two results of the same rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import UsageError
from batchinfer.store.outputs.call_column import CALLS_FIELD
from batchinfer.store.outputs.tokens import RESULT_SCHEMA
from batchinfer.store.results.diff import DiffOptions, ResultDiff, diff_results
from tests.batchinfer.wrong_jobs import NO_ENGINE, ROWS, CliOf, Command, make_place, run_once

Row = dict[str, Any]
SECRET = "a text that no option shows"


def row(number: int, **changes: Any) -> Row:
    known = {"row_id": number, "file": "rows.jsonl", "row_index": number, "custom_id": f"r{number}", "status": "ok",
             "generated_text": SECRET, "finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 4}  # fmt: skip
    return dict.fromkeys(RESULT_SCHEMA.names) | known | {"amount": 1, "tags": ["x"]} | changes


def error(number: int, code: str) -> Row:
    nothing = dict.fromkeys(("generated_text", "finish_reason", "completion_tokens", "amount", "tags"))
    return row(number, status="error", error_code=code, error_message=f"why {code}", **nothing)


Write = Callable[[str, list[Row]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def result(name: str, rows: list[Row], amount: pa.DataType | None = None) -> Path:
        extra = [("amount", amount or pa.int64()), ("tags", pa.list_(pa.string()))]
        table = pa.Table.from_pylist(rows, pa.schema([*RESULT_SCHEMA, *extra]))
        pq.write_table(table, tmp_path / f"{name}.parquet")
        return tmp_path / f"{name}.parquet"

    return result


def found(a: Path, b: Path, **options: Any) -> ResultDiff:
    return diff_results([a], [b], DiffOptions(**options))


def counts(diff: ResultDiff) -> dict[tuple[str, str | None], int]:
    return {(group.kind, group.name): group.rows for group in diff.groups}


def test_equal_results_do_not_differ(write: Write) -> None:
    rows = [row(0), row(1, amount=None, tags=None), error(2, "bad_json")]
    diff = found(write("a", rows), write("b", rows))
    assert (diff.different, diff.matched, diff.matched_by, diff.groups) == (False, 3, "custom_id", ())


def test_every_kind_of_difference(write: Write) -> None:
    a = [
        row(0),
        row(1),
        row(2),
        error(3, "bad_json"),
        error(4, "x"),
        row(5),
        row(6),
        row(7, amount=None),
        error(8, "e"),
    ]
    b = [row(0), row(1, generated_text="other"), error(2, "too_long"), row(3), error(4, "y"), row(6, amount=2), row(9),
         row(7, tags=["x", None]), error(8, "e")]  # fmt: skip
    diff = found(write("a", a), write("b", b))
    assert counts(diff) == {
        ("only in A", None): 1, ("only in B", None): 1, ("answer", None): 1, ("error came", "too_long"): 1,
        ("error went", "bad_json"): 1, ("error changed", "x → y"): 1, ("column", "amount"): 2, ("column", "tags"): 1,
    }  # fmt: skip
    assert (diff.rows_a, diff.rows_b, diff.matched) == (9, 9, 8)
    assert {
        group.name: [e.id for e in group.examples] for group in diff.groups if group.kind == "column"
    } == {"amount": ["r6", "r7"], "tags": ["r7"]}


def test_rows_are_matched_by_ids_in_any_order(write: Write) -> None:
    a, b = [row(n) for n in range(5)], [row(n, custom_id=f"r{4 - n}") for n in range(5)]
    assert not found(write("a", a), write("b", b)).different
    assert found(write("a", a), write("b", b), by="row_id").matched_by == "row_id"


@pytest.mark.parametrize(("second", "why"), [("r0", "only 1 different values"), (None, "is null in 1 rows")])
def test_without_usable_ids_rows_are_matched_by_position(second: str | None, why: str, write: Write) -> None:
    a = write("a", [row(0), row(1, custom_id=second)])
    b = write("b", [row(0), row(1, generated_text="other")])
    diff = found(a, b)
    assert (diff.matched_by, counts(diff)) == ("row_id", {("answer", None): 1})
    assert diff.note is not None
    assert why in diff.note
    with pytest.raises(UsageError, match="name a column that is different in every row"):
        found(a, b, by="custom_id")


def test_a_column_of_ones_own(write: Write) -> None:
    a = [row(n, amount=n, custom_id=None) for n in range(4)]
    b = [row(n, amount=3 - n, custom_id=None) for n in range(4)]
    assert counts(found(write("a", a), write("b", b))) == {("column", "amount"): 4}
    assert not found(write("a", a), write("b", b), by="amount").different
    with pytest.raises(UsageError, match="A has no column price"):
        found(write("a", a), write("b", b), by="price")


def test_types_that_changed_and_columns_that_came(write: Any, tmp_path: Path) -> None:
    a, b = (
        write("a", [row(0), row(1)]),
        write("b", [row(0, amount="1"), row(1, amount="2")], amount=pa.string()),
    )
    assert counts(found(a, b)) == {("column", "amount"): 1}
    more = pq.read_table(a).append_column("extra", pa.array([1, 2]))
    pq.write_table(more, tmp_path / "c.parquet")
    diff = found(a, tmp_path / "c.parquet")
    assert (diff.columns_only_a, diff.columns_only_b, diff.different) == ((), ("extra",), True)


def test_ids_of_tool_calls_are_not_compared(write: Write, tmp_path: Path) -> None:
    """They follow from the work key, which changes with the prompt."""

    def with_calls(name: str, *calls: list[tuple[str, str, str]] | None) -> Path:
        path, names = write(name, [row(n) for n in range(len(calls))]), ("id", "name", "arguments")
        dicts = [of and [dict(zip(names, one, strict=True)) for one in of] for of in calls]
        table = pq.read_table(path).append_column(CALLS_FIELD, pa.array(dicts, CALLS_FIELD.type))
        pq.write_table(table, tmp_path / f"{name}.parquet")
        return tmp_path / f"{name}.parquet"

    a = with_calls("a", [("call_1", "f", "{}")], [("call_2", "f", "{}")], [], None, [("call_3", "f", "{}")])
    b = with_calls("b", [("call_7", "f", "{}")], [("call_2", "f", '{"x": 1}')], [], None, [])
    diff = found(a, b, show=True)
    assert counts(diff) == {("column", "tool_calls"): 2}
    assert [one.id for one in diff.groups[0].examples] == ["r1", "r4"]


def test_examples_are_few_and_hold_no_text_unless_asked(write: Write) -> None:
    a = [row(n) for n in range(20)]
    b = [row(n, generated_text=f"other {n}") for n in range(19)] + [error(19, "x")]
    paths = write("a", a), write("b", b)
    quiet = found(*paths, examples=3)
    assert [len(group.examples) for group in quiet.groups] == [3, 1]
    assert SECRET not in str(asdict(quiet))
    answers, errors = found(*paths, examples=2, show=True).groups
    assert [(e.id, e.a, e.b) for e in answers.examples] == [
        ("r0", SECRET, "other 0"),
        ("r1", SECRET, "other 1"),
    ]
    assert [(e.a, e.b) for e in errors.examples] == [(SECRET, "why x")]


# --- the verb


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, Path]:
    """Results of two nights: r0 has another text, r1 is gone, r77 is new. Read only."""
    place = run_once(make_place(tmp_path_factory.mktemp("nights") / "job", model))
    before = place.folder / "before"
    shutil.copytree(place.results, before)
    place.rows({"id": "r0", "text": SECRET}, *ROWS[2:], {"id": "r77", "text": "new"})
    return before, run_once(place).results


@pytest.fixture
def two(nights: tuple[Path, Path], cli_of: CliOf) -> tuple[Path, Path, Command]:
    """The results of both nights, and the command line."""
    return (*nights, cli_of(NO_ENGINE))


def test_the_verb(two: tuple[Path, Path, Command]) -> None:
    a, b, run = two
    ended = run("diff", a, b)
    assert ended.code == 0
    assert "A has 20 rows, B 20; 19 matched by custom_id" in ended.out
    assert "only in A: 1 row  (custom_id r1)" in ended.out
    assert "only in B: 1 row  (custom_id r77)" in ended.out
    assert "column differs: text: 1 row  (custom_id r0)" in ended.out
    assert SECRET not in ended.out
    assert f"B: {SECRET}" in run("diff", a, b, "--show").out
    told = json.loads(run("diff", a, b, "--json").out)
    assert (told["exit_code"], told["different"], told["matched"]) == (0, True, 19)
    assert "text" in [group["name"] for group in told["groups"]]


def test_a_difference_sets_the_exit_code_on_request(two: tuple[Path, Path, Command]) -> None:
    a, b, run = two
    assert run("diff", a, b, "--fail-if-different").code == 65
    same = run("diff", b, b, "--fail-if-different")
    assert (same.code, "no difference" in same.out) == (0, True)


def test_what_is_no_result_is_named(two: tuple[Path, Path, Command]) -> None:
    a, b, run = two
    missing = run("diff", a, b.parent / "nowhere")
    assert (missing.code, "nowhere: there is no such folder" in missing.err) == (66, True)
    part = next(b.glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-10])
    damaged = run("diff", a, b)
    assert (damaged.code, "batchinfer verify" in damaged.err) == (74, True)
