"""Partial results: finished rows in input order, without a lock."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import Interrupted
from batchinfer.core.request import Completion, TokenLogprobs, Tokens
from batchinfer.filesystem.duck import interruptible
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.index.index import BestOf
from batchinfer.store.outputs.tokens import RESULT_SCHEMA
from batchinfer.store.results.partial import partial_reader, write_partial
from tests.batchinfer.store.small_index import (
    answer,
    bad_row,
    decode,
    good_row,
    keys_in,
    mixed_rows,
    write_index,
)
from tests.patience import PATIENCE_S


def test_finished_rows_while_a_run_holds_the_store(tmp_path: Path) -> None:
    rows = mixed_rows(30)
    index = write_index(tmp_path / "x", rows)
    keys = keys_in(rows)
    with CompletionStore(tmp_path / "c") as store:
        store.append(answer(key) for key in keys[5:12])
        store.commit()
        store.append([answer(keys[0])])  # not committed: not seen
        with partial_reader(index, store.path, decode, tmp_path / "spill") as reader:
            table = duckdb.from_arrow(reader).to_arrow_table()
    wanted = [row["row_id"] for row in rows if row.get("key") is None or row["key"] in keys[5:12]]
    assert table["row_id"].to_pylist() == wanted


def test_the_best_of_several_answers_appears_when_all_are_finished(tmp_path: Path) -> None:
    """Rows of 3 answers each, in batches whose usual size would divide some of them."""
    rows = [good_row(row, [row, 1]) for row in range(177)]
    rows += [bad_row(row) for row in range(177, 180)]
    index = replace(write_index(tmp_path / "x", rows, best=BestOf(1, 3)), logprobs=0)
    mean = {row: -float(row * 7 % 11) for row in range(177) if row not in (4, 130)}
    with CompletionStore(tmp_path / "c") as store:
        for row, value in mean.items():
            logprobs = TokenLogprobs(np.full(2, value, np.float32), np.zeros((2, 0)), np.zeros((2, 0)))
            tokens = Tokens(np.array([row, 7], np.int32), None, logprobs)
            store.append([Completion(rows[row]["key"], tokens, "stop")])
        store.commit()
        with partial_reader(index, store.path, decode, tmp_path / "spill") as reader:
            table = reader.read_all()
    found = [table.column(name).to_pylist() for name in ("row_id", "sample_index", "generated_text")]
    groups = [[3 * group + sample for sample in range(3)] for group in range(59)]
    best = [max(group, key=lambda row: (mean[row], -row)) for group in groups if mean.keys() >= {*group}]
    assert len(best) == 57
    wanted = [(row // 3, row % 3, f"{row} 7") for row in best]
    assert [*zip(*found, strict=True)] == [*wanted, (59, 0, None)]


def test_a_signal_ends_the_join_of_a_users_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in a separate database, which is interrupted together with the user's."""
    databases: list[Any] = []
    late: list[bool] = []

    def endless(database: Any, *_: Any) -> None:
        databases.append(database)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        database.execute(
            "SELECT count(*) FROM range(9999999) a, range(9999999) b WHERE a.range * b.range = -1"
        )

    def give_up() -> None:
        late.append(True)
        databases[0].interrupt()

    rows = mixed_rows(30)
    index = write_index(tmp_path / "x", rows)
    with CompletionStore(tmp_path / "c") as store:
        store.append(answer(key) for key in keys_in(rows))
        store.commit()
    monkeypatch.setattr("batchinfer.store.results.join.load_chosen", endless)
    watchdog = threading.Timer(PATIENCE_S, give_up)
    watchdog.start()
    interrupts = Interrupts()
    with (
        pytest.raises(Interrupted),
        interrupts.installed(),
        interrupts.reraised(),
        duckdb.connect() as users,
        interruptible(users) as watched,
    ):
        partial_reader(index, tmp_path / "c", decode, tmp_path / "spill", watched=watched).read_all()
    watchdog.cancel()
    assert late == [], "it was not the signal that ended the join"


def test_before_anything_ran_only_error_rows_are_there(tmp_path: Path) -> None:
    index = write_index(tmp_path / "x", mixed_rows(14))
    out = tmp_path / "partial.parquet"
    with partial_reader(index, tmp_path / "none", decode, tmp_path / "spill") as reader:
        write_partial(reader, out)
    table = pq.read_table(out)
    assert table.schema.equals(RESULT_SCHEMA)
    assert table["status"].to_pylist() == ["error", "error"]
