"""Work keys of a job's ladder are in its index, and equal the keys of the same requests in a job without a ladder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.prompts.keys import token_bytes, work_key
from batchinfer.store.index.index import INDEX_SCHEMA, Index, Layout, attempt_columns
from tests.batchinfer.store.index.ingest_kit import checkpoint, make_job, rows_of, run, write_lines

LADDER = ({"temperature": 0.7, "seed": 1}, {"max_tokens": 9}, {"seed": 8})
OWN = ("max_tokens", "min_tokens", "temperature", "top_p", "seed")
ROWS: list[dict[str, Any]] = [
    {"ids": [1, 2, 3]},
    {"ids": [2], "top_p": 0.5},
    {"ids": [3], "max_tokens": 9},
    {"ids": [4], "min_tokens": 10, "max_tokens": 20},
    {"ids": [5], "temperature": 0.7},
    {"ids": [6], "temperature": 0.7, "seed": 1},
    {"ids": []},
    {"ids": [7], "seed": 3},
    {"ids": [8], "temperature": 0.7, "seed": 8},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint(tmp_path / "model")
    return tmp_path


def made(
    folder: Path, rows: list[dict[str, Any]], ladder: tuple[dict[str, Any], ...] = (), **more: Any
) -> Index:
    path = str(write_lines(folder / "rows.jsonl", rows))
    sampling = {"from_columns": OWN}
    return run(
        make_job(folder, path=path, prompt={"token_ids": "ids"}, sampling=sampling, on_invalid=ladder, **more)
    )


def params_of(row: dict[str, Any], rung: dict[str, Any]) -> SamplingParams:
    own = {name: value for name, value in row.items() if name != "ids"}
    return SamplingParams(**{**own, **rung}).canonical()


def test_a_rung_has_the_key_of_the_row_with_its_parameters(folder: Path) -> None:
    """A rung has no key if it repeats an earlier attempt, or has too few tokens."""
    found = rows_of(made(folder, ROWS, LADDER))
    for given, row in zip(ROWS, found, strict=True):
        asked: set[str] = set()
        for attempt, rung in enumerate([{}, *LADDER], 1):
            params = params_of(given, rung)
            text, tokens = params.to_json(), token_bytes(np.array(given["ids"], np.int32))
            lacks = not given["ids"] or text in asked or params.min_tokens > params.max_tokens
            wanted = None if lacks else (work_key(b"c" * 32, text, tokens), text, params.max_tokens)
            columns = attempt_columns(attempt)
            assert tuple(row[name] for name in columns) == (wanted or (None, None, None))
            asked.add(text)
    rungs = [[row[f"key_{number}"] is not None for number in (2, 3, 4)] for row in found]
    assert rungs[0] == [True, True, False], "a greedy row has no use for a seed"
    assert rungs[2] == [True, False, False], "it has max_tokens 9"
    assert rungs[3] == [True, False, False], "it wants at least 10"
    assert rungs[5] == [False, True, True], "it has the temperature and the seed"
    assert rungs[6] == [False] * 3


def test_equal_rows_have_equal_rungs_where_they_are_the_same_work(folder: Path) -> None:
    rows = [*ROWS, ROWS[0], ROWS[4]]
    found = rows_of(made(folder, rows, (*LADDER[:2], {"temperature": 0})))
    keys = ("key", "key_2", "key_3", "key_4")
    assert [found[0][name] == found[-2][name] for name in keys] == [True, True, True, True]
    assert [found[4][name] == found[-1][name] for name in keys] == [False, False, False, True]


def test_a_repeated_id_has_no_attempts(folder: Path) -> None:
    rows = [{**ROWS[n], "id": "same"} for n in range(len(ROWS))]
    row = rows_of(made(folder, rows, LADDER, id="id", unique_ids=True))[1]
    assert row["error_code"] == "duplicate_custom_id"
    work = ("key", "params", "expected_tokens")
    assert all(row[name] is None for name in row if name.startswith(work))


def test_an_index_without_a_ladder_is_unchanged(folder: Path) -> None:
    index = made(folder, ROWS)
    assert pq.read_schema(index.index_parts[0]).equals(INDEX_SCHEMA)
    assert "attempts" not in Layout(index.folder).marker.read_text()
    assert (index.attempts, Index.open(made(folder, ROWS, LADDER).folder).attempts) == (1, 4)
