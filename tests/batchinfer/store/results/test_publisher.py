"""The published table: one row per input row, in order, deterministic bytes, atomic replacement."""

from __future__ import annotations

import datetime
import json
import resource
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import BatchInferError, OutputConflict, StorageError
from batchinfer.core.request import Completion, Tokens
from batchinfer.filesystem.durable import ExchangeUnsupported, FileOps
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.state import StateFolder
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.outputs.tokens import RESULT_SCHEMA
from batchinfer.store.results.join import ErrorCounts, join_answers
from batchinfer.store.results.manifest import PublishSpec, is_published, read_manifest
from batchinfer.store.results.publisher import publish
from batchinfer.store.results.result_rows import result_schema
from batchinfer.store.results.verify import verify_result
from tests.batchinfer.store.small_index import (
    SPEC,
    answer,
    bad_row,
    decode,
    failure,
    good_row,
    keys_in,
    mixed_rows,
    published,
    published_files,
    small_index,
    write_index,
)

THEIRS = PublishSpec("theirs", "3" * 64, (), 1)


def rows_in(folder: Path) -> list[dict[str, Any]]:
    files = read_manifest(Location.at(folder)).files  # type: ignore[union-attr]
    return [row for file in files for row in pq.read_table(folder / file.name).to_pylist()]


def test_every_input_row_gives_one_row_in_order(tmp_path: Path) -> None:
    rows = mixed_rows(35, distinct=12)
    index = write_index(tmp_path / "x", rows, rows_per_part=6)
    manifest = published(tmp_path, index, map(answer, keys_in(rows)))
    result = rows_in(tmp_path / "res")
    assert [row["row_id"] for row in result] == list(range(35))
    assert [file.rows for file in manifest.files] == [10, 10, 10, 5]
    assert (manifest.rows, manifest.ok, manifest.errors) == (35, 30, 5)
    for given, row in zip(rows, result, strict=True):
        if given.get("key") is None:
            assert (row["status"], row["error_code"], row["generated_text"]) == ("error", "bad_json", None)
            continue
        tokens = answer(given["key"]).tokens.token_ids.tolist()
        assert row["generated_text"] == " ".join(map(str, tokens))
        assert (row["completion_tokens"], row["prompt_tokens"]) == (len(tokens), 3)
        assert (row["status"], row["finish_reason"], row["retryable"]) == ("ok", "stop", None)
    assert verify_result(Location.at(tmp_path / "res")) == []


def test_the_schema_is_the_documented_one_even_without_rows(tmp_path: Path) -> None:
    index = write_index(tmp_path / "x", [])
    published(tmp_path, index)
    table = duckdb.sql(f"SELECT * FROM '{tmp_path}/res/*.parquet'").to_arrow_table()
    assert (table.num_rows, table.column_names) == (0, RESULT_SCHEMA.names)


def test_a_stop_string_truncates_the_text_and_an_error_completion_is_an_error_row(tmp_path: Path) -> None:
    rows = [good_row(0, [1]), good_row(1, [2]), good_row(2, [3])]
    keys = keys_in(rows)
    truncated = answer(keys[0], 4)
    truncated = Completion(truncated.key, Tokens(truncated.tokens.token_ids, text_length=2), "stop")
    published(tmp_path, write_index(tmp_path / "x", rows), [truncated, failure(keys[1]), answer(keys[2], 0)])
    first, second, third = rows_in(tmp_path / "res")
    assert len(first["generated_text"]) == 2
    assert first["completion_tokens"] == 4
    assert (second["status"], second["error_class"], second["retryable"]) == ("error", "engine", True)
    assert (second["finish_reason"], second["completion_tokens"], second["prompt_tokens"]) == (None, None, 1)
    assert (third["status"], third["generated_text"], third["completion_tokens"]) == ("ok", "", 0)


def test_an_answer_counts_more_than_an_error_and_the_first_answer_stays(tmp_path: Path) -> None:
    rows = [good_row(0, [1])]
    key = keys_in(rows)[0]
    published(tmp_path, write_index(tmp_path / "x", rows), [failure(key), answer(key, 2), answer(key, 3)])
    assert rows_in(tmp_path / "res")[0]["completion_tokens"] == 2


def test_answers_of_a_cluster_name_the_class_of_their_machine(tmp_path: Path) -> None:
    """Answers of a single machine have no class. An error row has the class of the engine that failed."""
    rows = [good_row(0, [1]), bad_row(1), good_row(2, [2]), good_row(3, [3])]
    keys = keys_in(rows)
    given = [replace(answer(keys[1]), engine_class="H100"), replace(failure(keys[2]), engine_class="A100")]
    index = replace(write_index(tmp_path / "x", rows), engine_class=True)
    published(tmp_path, index, [answer(keys[0])], given)
    assert [row["engine_class"] for row in rows_in(tmp_path / "res")] == [None, None, "H100", "A100"]


def test_passthrough_columns_keep_their_types(tmp_path: Path) -> None:
    values = pa.table(
        {
            "day": pa.array([datetime.date(2024, 1, n + 1) for n in range(3)], pa.date32()),
            "price": pa.array([1, None, 3], pa.decimal128(9, 2)),
            "tags": pa.array([["a"], [], None], pa.list_(pa.string())),
            "when": pa.array([0, 1, 2], pa.timestamp("ms", tz="UTC")),
            "kind": pa.array(["x", "y", "x"]).dictionary_encode(),
            "meta": pa.array([{"a": 1}, None, {"a": 2}], pa.struct([("a", pa.int8())])),
        }
    )
    rows = [good_row(0, [1]), bad_row(1), good_row(2, [2])]
    index = write_index(tmp_path / "x", rows, values, rows_per_part=2)
    manifest = published(tmp_path, index, map(answer, keys_in(rows)))
    table = pq.read_table(tmp_path / "res" / manifest.files[0].name)
    assert table.schema.equals(result_schema(index))
    assert table.select(values.column_names).to_pylist() == values.to_pylist()


def test_a_passthrough_column_cannot_take_one_of_our_names() -> None:
    with pytest.raises(ValueError, match="status: the result has a column of this name"):
        result_schema(small_index(Path(), 0, pa.schema([("status", pa.string())])))
    with pytest.raises(ValueError, match="logprobs: the result has a column of this name"):
        result_schema(small_index(Path(), 0, pa.schema([("logprobs", pa.string())]), logprobs=0))
    assert "logprobs" in result_schema(small_index(Path(), 0, pa.schema([("logprobs", pa.string())]))).names


def test_equal_rows_give_equal_bytes_however_they_were_computed(tmp_path: Path) -> None:
    rows = mixed_rows(5000, distinct=300)
    keys = keys_in(rows)
    spec = PublishSpec("job", "1" * 64, (), 1, 4500)
    one = write_index(tmp_path / "xa", rows)
    published(tmp_path / "a", one, map(answer, keys), spec=spec, threads=1)
    other = write_index(tmp_path / "xb", rows, rows_per_part=77)
    published(tmp_path / "b", other, map(answer, reversed(keys)), spec=spec, threads=2)
    assert published_files(tmp_path / "a") == published_files(tmp_path / "b")


def test_a_dictionary_contains_only_the_values_of_its_rows(tmp_path: Path) -> None:
    """For any chunks of the index, and any dictionary of the input."""
    rows = mixed_rows(1800)
    texts = pa.array([None if n % 11 == 0 else f"kind {n * 7 % 13}" for n in range(1800)])
    wide = pa.array([f"kind {n}" for n in range(100)])
    lean = pa.table({"kind": texts.dictionary_encode()})
    full = pa.table({"kind": pa.DictionaryArray.from_arrays(pc.index_in(texts, wide), wide)})
    spec = PublishSpec("job", "1" * 64, (), 1, 1000)
    for side, values, rows_per_part in (("a", lean, 1800), ("b", full, 140)):
        index = write_index(tmp_path / f"x{side}", rows, values, rows_per_part)
        published(tmp_path / side, index, map(answer, keys_in(rows)), spec=spec)
    assert published_files(tmp_path / "a") == published_files(tmp_path / "b")
    table = pq.read_table(tmp_path / "a" / "res")
    assert table.column("kind").type == pa.dictionary(pa.int32(), pa.string())
    assert table.column("kind").to_pylist() == texts.to_pylist()


def test_a_path_with_glob_characters_is_only_a_path(tmp_path: Path) -> None:
    """`a[1]` must not read its neighbour `a1`."""
    for name, count in (("a1", 3), ("a[1]", 5), ("a*'", 7)):
        rows = [good_row(i, [count, i]) for i in range(count)]
        index = write_index(tmp_path / name / "x", rows)
        assert published(tmp_path / name, index, map(answer, keys_in(rows))).ok == count


def test_a_damaged_part_is_an_error_that_names_the_cure(tmp_path: Path) -> None:
    rows = mixed_rows(20)
    index = write_index(tmp_path / "x", rows)
    state = StateFolder(tmp_path / "res")
    with state.lock(), CompletionStore(state.completions) as store:
        store.append(answer(key) for key in keys_in(rows))
        store.commit()
        part = store.parts()[0]
        part.write_bytes(b"PAR1" + b"\0" * (part.stat().st_size - 4))
        with pytest.raises(StorageError, match="--verify"):
            publish(
                index, join_answers(index.index_parts, store.parts(), tmp_path / "join"), SPEC, decode, state
            )
    assert not (tmp_path / "res").exists()


def test_missing_completions_publish_nothing(tmp_path: Path) -> None:
    rows = mixed_rows(20)
    with pytest.raises(BatchInferError, match="3 rows have no completion yet"):
        published(tmp_path, write_index(tmp_path / "x", rows), map(answer, keys_in(rows)[3:]))
    assert not (tmp_path / "res").exists()


def test_a_rerun_finds_its_result_published(tmp_path: Path) -> None:
    rows = mixed_rows(20)
    manifest = published(tmp_path, write_index(tmp_path / "x", rows), map(answer, keys_in(rows)))
    result = tmp_path / "res"
    assert is_published(Location.at(result), SPEC)
    assert not is_published(Location.at(result), PublishSpec("job", "2" * 64, SPEC.inputs, 1, 10))
    assert not is_published(Location.at(result), PublishSpec("job", "1" * 64, SPEC.inputs, 1, 11))
    assert not is_published(Location.at(tmp_path / "elsewhere"), SPEC)
    (result / manifest.files[0].name).unlink()
    assert not is_published(Location.at(result), SPEC)


def test_the_older_result_is_kept_aside(tmp_path: Path) -> None:
    old = published(
        tmp_path, write_index(tmp_path / "x", mixed_rows(5, distinct=1)), [answer(mixed_rows(1)[0]["key"])]
    )
    rows = mixed_rows(8)
    new = published(tmp_path, write_index(tmp_path / "y", rows), map(answer, keys_in(rows)))
    assert new.generation != old.generation
    assert read_manifest(Location.at(tmp_path / "res")) == new
    assert read_manifest(Location.at(StateFolder(tmp_path / "res").generations / old.generation)) == old


class NoExchange(FileOps):
    def exchange(self, one: Path, other: Path) -> None:
        raise ExchangeUnsupported(95, "not here")


def test_without_an_exchange_the_older_result_is_moved_away_first(tmp_path: Path) -> None:
    old = published(tmp_path, write_index(tmp_path / "x", [bad_row(0)]))
    state = StateFolder(tmp_path / "res", ops=NoExchange())
    new = published(tmp_path, write_index(tmp_path / "y", [bad_row(0), bad_row(1)]), state=state)
    assert read_manifest(Location.at(tmp_path / "res")) == new
    assert read_manifest(Location.at(StateFolder(tmp_path / "res").generations / old.generation)) == old


def test_an_empty_folder_may_be_taken(tmp_path: Path) -> None:
    (tmp_path / "res").mkdir()
    published(tmp_path, write_index(tmp_path / "x", [bad_row(0)]))
    assert (tmp_path / "res" / "_manifest.json").exists()


@pytest.mark.parametrize("replace", [False, True])
def test_a_folder_with_other_files_is_never_touched(tmp_path: Path, replace: bool) -> None:
    index = write_index(tmp_path / "x", [bad_row(0)])
    (tmp_path / "res").mkdir()
    (tmp_path / "res" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputConflict, match=r"thesis\.txt"):
        published(tmp_path, index, replace=replace)
    assert (tmp_path / "res" / "thesis.txt").read_text() == "years of work"


def test_a_file_put_among_our_results_is_not_moved_away(tmp_path: Path) -> None:
    published(tmp_path, write_index(tmp_path / "x", [bad_row(0)]))
    (tmp_path / "res" / "notes.txt").touch()
    with pytest.raises(OutputConflict, match=r"notes\.txt"):
        published(tmp_path, write_index(tmp_path / "y", [bad_row(0), bad_row(1)]))


def test_another_jobs_result_needs_replace(tmp_path: Path) -> None:
    index = write_index(tmp_path / "x", [bad_row(0)])
    published(tmp_path, index, spec=THEIRS)
    with pytest.raises(OutputConflict, match="holds the result of job 'theirs', not of 'job'"):
        published(tmp_path, index)
    assert published(tmp_path, index, replace=True).job == "job"


def test_a_newer_manifest_is_refused(tmp_path: Path) -> None:
    index = write_index(tmp_path / "x", [bad_row(0)])
    published(tmp_path, index)
    path = tmp_path / "res" / "_manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 9}))
    with pytest.raises(OutputConflict, match="manifest format 9"):
        published(tmp_path, index, replace=True)


def test_verify_names_what_is_damaged(tmp_path: Path) -> None:
    manifest = published(tmp_path, write_index(tmp_path / "x", [bad_row(n) for n in range(25)]))
    result = tmp_path / "res"
    paths = [result / file.name for file in manifest.files]
    data = bytearray(paths[0].read_bytes())
    data[40] ^= 1
    paths[0].write_bytes(data)
    paths[1].unlink()
    (result / "stray.parquet").write_bytes(paths[2].read_bytes())
    assert {problem.file.local for problem in verify_result(Location.at(result))} == {
        *paths[:2],
        result / "stray.parquet",
    }


def test_errors_are_counted_per_row(tmp_path: Path) -> None:
    rows = [bad_row(0), bad_row(1, retryable=True), good_row(2, [1]), good_row(3, [1]), good_row(4, [2])]
    keys = keys_in(rows)
    index = write_index(tmp_path / "x", rows)
    with CompletionStore(tmp_path / "c") as store:
        store.append([failure(keys[0])])
        store.commit()
        counts = join_answers(index.index_parts, store.parts(), tmp_path / "spill").counts
    assert counts == ErrorCounts(rows=5, input_errors=2, engine_errors=2, retryable=3)
    assert counts.errors == 4


def test_a_reader_never_sees_a_mixture(tmp_path: Path) -> None:
    """A glob query during many exchanges returns one generation, or raises an error."""
    indexes = [
        write_index(tmp_path / n, [{**bad_row(i), "file": n} for i in range(40)]) for n in ("old", "new")
    ]
    published(tmp_path, indexes[0])
    stop = threading.Event()
    seen: set[tuple[int, int]] = set()

    def read() -> None:
        with duckdb.connect() as database:
            while not stop.is_set():
                try:
                    query = f"SELECT count(*), count(DISTINCT file) FROM '{tmp_path}/res/*.parquet'"
                    seen.update(database.execute(query).fetchall())
                except duckdb.Error:  # loud: allowed
                    continue

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for turn in range(6):
            published(tmp_path, indexes[(turn + 1) % 2])
    finally:
        stop.set()
        reader.join()
    assert seen == {(40, 1)}


@pytest.mark.slow
def test_publishing_is_fast_and_bounded(tmp_path: Path) -> None:
    rows = mixed_rows(100_000, distinct=60_000)
    index = write_index(tmp_path / "x", rows, rows_per_part=50_000)
    completions = [answer(key, 40) for key in keys_in(rows)]
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    published(tmp_path, index, completions, spec=PublishSpec("job", "1" * 64, (), 1), memory_limit="300MB")
    seconds = time.perf_counter() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{100_000 / seconds:.0f} rows/s, peak memory grew by {grown:.0f} MiB")
    assert 100_000 / seconds > 30_000 / 3  # a busy machine may take three times as long
    assert grown < 600
