"""Log-probabilities from completions to the column of the result: stored, joined, published, cleaned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from batchinfer.core.request import Completion, TokenLogprobs, Tokens
from batchinfer.filesystem.state import StateFolder
from batchinfer.store.answers import completion_store
from batchinfer.store.answers.cleaning import THOROUGH, RetentionRule, clean_store
from batchinfer.store.answers.completion_store import COMPLETION_SCHEMA, CompletionStore
from batchinfer.store.columns.logprob_column import LOGPROBS_FIELD
from batchinfer.store.index.index import Index
from batchinfer.store.outputs import tokens
from batchinfer.store.results import result_files
from batchinfer.store.results.manifest import PublishSpec
from batchinfer.store.results.partial import partial_reader
from tests.batchinfer.store.small_index import (
    answer,
    bad_row,
    decode,
    failure,
    good_row,
    keys_in,
    published,
    small_index,
    write_index,
)


def with_logprobs(completion: Completion, most: int, text_length: int | None = None) -> Completion:
    """Add log-probabilities that encode row, token and rank."""
    ids = completion.tokens.token_ids
    ranks = np.arange(most, dtype=np.float32)
    chosen = (-ids / 4 - 1).astype(np.float32)
    top_ids = (ids[:, None] + np.arange(most)).astype(np.int32)
    found = TokenLogprobs(chosen, (chosen[:, None] - ranks / 8).astype(np.float32), top_ids)
    return Completion(completion.key, Tokens(ids, text_length, found), completion.finish_reason)


def shown(completion: Completion, kept: int | None = None) -> list[dict[str, Any]] | None:
    """Return the expected value of the result's column."""
    found = completion.tokens.logprobs
    if found is None:
        return None

    def token(number: int, logprob: float) -> dict[str, Any]:
        (text,) = decode.token_texts([number])
        return {"token_id": number, "token": text, "logprob": logprob}

    return [
        token(*own) | {"top": [token(*likely) for likely in zip(ids, logprobs, strict=True)]}
        for *own, ids, logprobs in zip(
            completion.tokens.token_ids.tolist(),
            found.chosen.tolist(),
            found.top_ids.tolist(),
            found.top.tolist(),
            strict=True,
        )
    ][:kept]


def rows_and_answers(count: int = 30) -> tuple[list[dict[str, Any]], dict[bytes, Completion]]:
    """Return rows and answers. Some rows request 0 to 3 alternatives, some are errors, two are duplicates."""
    rows = [bad_row(i) if i == 4 else good_row(i, [i, 1]) for i in range(count)]
    rows[9] = good_row(9, [8, 1])
    answers: dict[bytes, Completion] = {}
    for number, key in enumerate(keys_in(rows)):
        plain = failure(key) if number == 6 else answer(key)
        answers[key] = plain if number % 3 == 2 or number == 6 else with_logprobs(plain, number % 4)
    return rows, answers


def index_of(folder: Path, rows: list[dict[str, Any]], logprobs: int | None = 3) -> Index:
    made = write_index(folder, rows, rows_per_part=7)
    return small_index(made.folder, made.rows, logprobs=logprobs)


def results_of(folder: Path, *given: Any, **more: Any) -> Path:
    published(folder, *given, **more)
    return folder / "res"


def column(results: Path) -> list[Any]:
    found = duckdb.sql(f"SELECT logprobs FROM '{results}/*.parquet' ORDER BY row_id").fetchall()
    return [row for (row,) in found]


def test_every_row_has_its_own_log_probabilities(tmp_path: Path) -> None:
    """Parts of the store without, with some and with others, in any order."""
    rows, answers = rows_and_answers()
    plain = [one for one in answers.values() if one.tokens.logprobs is None]
    asked = [one for one in answers.values() if one.tokens.logprobs is not None]
    for name, commits in {
        "new last": [plain, asked],
        "new first": [asked, plain],
        "mixed": [plain + asked],
    }.items():
        folder = tmp_path / name
        results = results_of(folder, index_of(folder / "x", rows), *commits)
        wanted = [shown(answers[row["key"]]) if row.get("key") else None for row in rows]
        assert column(results) == wanted
        files = sorted(results.glob("*.parquet"))
        assert all(pq.read_schema(file).field("logprobs").equals(LOGPROBS_FIELD) for file in files)
    assert sum(found is not None for found in wanted) > 15
    assert {len(found[0]["top"]) for found in wanted if found} == {0, 1, 2, 3}


def test_a_store_without_any_gives_a_column_of_nulls(tmp_path: Path) -> None:
    rows = [good_row(0, [1, 1]), bad_row(1)]
    results = results_of(tmp_path, index_of(tmp_path / "x", rows), [answer(key) for key in keys_in(rows)])
    assert column(results) == [None, None]


def test_a_job_without_log_probabilities_has_no_column_and_the_same_bytes(tmp_path: Path) -> None:
    """Independent of other jobs' answers in a shared store."""
    rows, answers = rows_and_answers()
    silent = [answer(key) if one.error is None else one for key, one in answers.items()]
    others = [with_logprobs(answer(bytes([250, n] * 16)), 2) for n in range(5)]
    one = results_of(tmp_path / "a", index_of(tmp_path / "a/x", rows, None), silent)
    two = results_of(tmp_path / "b", index_of(tmp_path / "b/x", rows, None), others + silent)
    files = [[file.read_bytes() for file in sorted(results.glob("*.parquet"))] for results in (one, two)]
    assert files[0] == files[1]
    assert "logprobs" not in pq.read_schema(next(one.glob("*.parquet"))).names


def test_parts_without_log_probabilities_are_unchanged(tmp_path: Path) -> None:
    with CompletionStore(tmp_path) as store:
        store.append(answer(bytes([n] * 32)) for n in range(5))
        store.commit()
        assert pq.read_schema(store.parts()[0]).equals(COMPLETION_SCHEMA)
        store.append([with_logprobs(answer(bytes([9] * 32)), 2), answer(bytes([10] * 32))])
        store.commit()
        table = pq.read_table(store.parts()[1])
    assert table.schema.names[: len(COMPLETION_SCHEMA)] == COMPLETION_SCHEMA.names
    assert table["top_logprobs"].to_pylist()[1] is None
    assert len(table["top_logprobs"][0]) == 2 * len(table["token_ids"][0])


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("text_length", "kept"), [(None, 4), (12, 4), (9, 3), (7, 3), (6, 2), (3, 2), (2, 1), (1, 1), (0, 0)]
)
def test_a_stop_string_truncates_log_probabilities_with_the_text(
    tmp_path: Path, text_length: int | None, kept: int
) -> None:
    """The text is "11 222 33 44". A token may be split in its middle."""
    row = good_row(0, [1])
    whole = Completion(row["key"], Tokens(np.array([11, 222, 33, 44], np.int32)), "stop")
    completion = with_logprobs(whole, 2, text_length=text_length)
    results = results_of(tmp_path, index_of(tmp_path / "x", [row]), [completion])
    assert column(results) == [shown(completion, kept)]


def test_special_tokens_have_log_probabilities(tmp_path: Path) -> None:
    """The text omits them, but the end of an answer has a probability, too."""
    row = good_row(0, [1])
    completion = with_logprobs(Completion(row["key"], Tokens(np.array([5, 1001], np.int32)), "stop"), 1)
    results = results_of(tmp_path, index_of(tmp_path / "x", [row]), [completion])
    assert [token["token"] for token in column(results)[0]] == [" 5", "<1001>"]


def test_equal_rows_give_equal_bytes_for_any_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups end by the number of log-probabilities of rows, not by batches."""
    rows, answers = rows_and_answers(60)
    spec = PublishSpec("job", "1" * 64, (), 1, 25)
    monkeypatch.setattr(result_files, "GROUP_ENTRIES", 60)
    files: list[list[bytes]] = []
    for size in (1, 4, 7, 1000):
        monkeypatch.setattr(tokens, "LOGPROB_ROWS", size)
        folder = tmp_path / str(size)
        results = results_of(folder, index_of(folder / "x", rows), [*answers.values()], spec=spec)
        found = sorted(results.glob("*.parquet"))
        files.append([file.read_bytes() for file in found])
    assert files[0] == files[1] == files[2] == files[3]
    assert [pq.read_metadata(file).num_rows for file in found] == [25, 25, 10]
    groups = pq.read_metadata(found[0])
    sizes = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]
    assert len(sizes) > 3
    assert max(sizes) > 1
    monkeypatch.setattr(result_files, "GROUP_ENTRIES", 0)
    results = results_of(
        tmp_path / "none", index_of(tmp_path / "none/x", rows), [*answers.values()], spec=spec
    )
    groups = pq.read_metadata(next(iter(sorted(results.glob("*.parquet")))))
    silent = sum(not (row.get("key") and answers[row["key"]].tokens.logprobs) for row in rows[:25])
    assert groups.num_row_groups >= 25 - silent, "a row with more than a group may have is a group"


def test_many_bytes_are_committed_before_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = with_logprobs(answer(bytes([1] * 32), 10), 20)
    assert one.tokens.logprobs is not None
    size = 10 * (4 + 20 * 8)
    monkeypatch.setattr(completion_store, "PENDING_BYTES", 3 * size)
    with CompletionStore(tmp_path) as store:
        committed = []
        for _ in range(7):
            store.append([one])
            committed.append(store.maybe_commit())
    assert committed == [0, 0, 3, 0, 0, 3, 0]


def test_cleaning_keeps_log_probabilities(tmp_path: Path) -> None:
    """Parts with and without them are merged."""
    rows, answers = rows_and_answers()
    ordered = [*answers.values()]
    state = StateFolder(tmp_path / "res")
    with CompletionStore(state.completions) as store:
        for start in range(0, len(ordered), 5):
            store.append(ordered[start : start + 5])
            store.commit()
        assert len(store) == len(ordered)
    cleaned = clean_store(state.completions, RetentionRule(30), THOROUGH)
    assert (cleaned.parts_before, cleaned.parts_after) == (6, 1)
    results = results_of(tmp_path, index_of(tmp_path / "x", rows))
    assert column(results) == [shown(answers[row["key"]]) if row.get("key") else None for row in rows]


def test_cleaning_parts_without_any_adds_no_columns(tmp_path: Path) -> None:
    with CompletionStore(tmp_path) as store:
        for start in (0, 5):
            store.append(answer(bytes([start + n] * 32)) for n in range(5))
            store.commit()
    clean_store(tmp_path, RetentionRule(30), THOROUGH)
    (part,) = tmp_path.glob("part-*.parquet")
    assert pq.read_schema(part).equals(COMPLETION_SCHEMA)


def test_partial_results_have_log_probabilities(tmp_path: Path) -> None:
    rows, answers = rows_and_answers()
    index = index_of(tmp_path / "x", rows)
    with CompletionStore(tmp_path / "c") as store:
        store.append([*answers.values()][:8])
        store.commit()
        reader = partial_reader(index, store.path, decode, tmp_path / "spill")
        found = duckdb.from_arrow(reader).to_arrow_table()
    of_row = {row["row_id"]: row.get("key") for row in rows}
    for row_id, logprobs in zip(found["row_id"].to_pylist(), found["logprobs"].to_pylist(), strict=True):
        key = of_row[row_id]
        wanted = shown(answers[key]) if key else None
        assert logprobs == wanted
    assert sum(found["logprobs"].is_valid().to_pylist()) > 4
