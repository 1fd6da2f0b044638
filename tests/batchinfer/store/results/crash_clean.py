"""Cleaning a small store, which can be killed at any file operation.

    python -m tests.batchinfer.store.results.crash_clean ROOT LAST STEP

Works like crash_job.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from batchinfer.filesystem.durable import FileOps
from batchinfer.store.answers.cleaning import RetentionRule, clean_store
from batchinfer.store.answers.completion_store import CompletionStore, read_records
from batchinfer.store.answers.uses import UsingResult, record_use, write_uses
from tests.batchinfer.store.results.crash_job import kill_each
from tests.batchinfer.store.small_index import answer

DAY = 86400
NOW = 1_800_000_000
KEYS = [bytes([n]) * 32 for n in range(48)]
# parts of six rows: days since the commit, and the rows used yesterday
PARTS: list[tuple[int, list[int]]] = [
    (90, []),  # goes
    (80, [0, 1, 2, 3, 4, 5]),
    (70, [2]),
    (60, []),  # goes
    (50, [1, 3]),
    (45, []),  # goes
    (2, []),  # too new to remove
    (1, []),
]
KEPT = [
    KEYS[6 * part + row] for part, (age, used) in enumerate(PARTS) for row in (used if age > 30 else range(6))
]
DROPPED = sorted(set(KEYS) - set(KEPT))
ME = UsingResult("/d/res", "", 30)


def prepare(folder: Path) -> None:
    """Write two files of uses: of long ago, and of yesterday."""
    for start in range(0, len(KEYS), 6):
        with CompletionStore(
            folder, numerics=1 + start // 30
        ) as store:  # only parts of equal numerics are joined
            store.append(answer(key) for key in KEYS[start : start + 6])
            store.commit()
    with CompletionStore(folder) as store:
        names, rows = [part.name for part in store.parts()], store.rows_by_part()
        for part, (age, _) in zip(store.parts(), PARTS, strict=True):
            os.utime(part, (NOW - age * DAY, NOW - age * DAY))
        every = np.arange(6)
        write_uses(folder, record_use(ME, [(name, every) for name in names], rows, NOW - 40 * DAY), FileOps())
        used = [(name, np.array(mine)) for name, (_, mine) in zip(names, PARTS, strict=True) if mine]
        write_uses(folder, record_use(ME, used, rows, NOW - DAY), FileOps())


def clean(folder: Path, ops: FileOps) -> None:
    clean_store(folder, RetentionRule(30, ME.job, NOW), ops=ops)


def keys(folder: Path) -> list[bytes]:
    """Return the keys of the store as its next reader sees them."""
    records, discarded = read_records(folder, verify=True)
    assert discarded == ()
    return [key for part in sorted(records) for key in pq.read_table(part)["key"].to_pylist()]


def check(folder: Path) -> None:
    """Check that every kept key exists once and in its old order, and no other key twice."""
    found = keys(folder)
    assert len(set(found)) == len(found)
    assert [key for key in found if key in KEPT] == KEPT


if __name__ == "__main__":
    kill_each(range(0, int(sys.argv[2]), int(sys.argv[3])), Path(sys.argv[1]), prepare, clean, check)
