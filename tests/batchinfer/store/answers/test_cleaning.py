"""Cleaning a store: kept parts, merged parts, their cost, and damaged parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import Locked, StorageError
from batchinfer.filesystem.durable import FileOps
from batchinfer.store.answers import cleaning
from batchinfer.store.answers.cleaning import CHEAP, THOROUGH, CleaningResult, RetentionRule, clean_store
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.answers.uses import UsingResult, read_uses, record_use, use_files, write_uses
from batchinfer.store.results.join import join_answers
from batchinfer.store.results.verify import verify_store
from tests.batchinfer.store.small_index import answer, failure, keys_in, mixed_rows, write_index

DAY = 86400
NOW = 1_800_000_000
KEYS = [n.to_bytes(2, "big") * 16 for n in range(3000)]
ME = UsingResult("/d/res", "", 30)


def filled(store: Path, *sizes: int, age: float = 100) -> list[Path]:
    """Fill a store with parts of the given sizes, committed `age` days ago."""
    with CompletionStore(store) as opened:
        start = len(opened)
        for size in sizes:
            opened.append(answer(key) for key in KEYS[start : start + size])
            opened.commit()
            start += size
        parts = opened.parts()[-len(sizes) :]
    for part in parts:
        os.utime(part, (NOW - age * DAY, NOW - age * DAY))
    return parts


def use(store: Path, part: Path, rows: Sequence[int], age: float, user: UsingResult = ME) -> None:
    count = pq.read_metadata(part).num_rows
    noted = record_use(user, [(part.name, np.array(rows))], {part.name: count}, NOW - age * DAY)
    write_uses(store, noted, FileOps())


def keys_of(store: Path) -> list[bytes]:
    with CompletionStore(store, verify=True) as opened:
        assert opened.discarded == ()
        return [key for part in opened.parts() for key in pq.read_table(part)["key"].to_pylist()]


def clean(
    store: Path, keep: int | None = 30, policy: cleaning.Policy = THOROUGH, later: float = 0
) -> CleaningResult:
    return clean_store(store, RetentionRule(keep, ME.job, NOW + later * DAY), policy)


def test_rows_are_removed_when_their_last_use_is_too_old(tmp_path: Path) -> None:
    (part,) = filled(tmp_path, 100)
    use(tmp_path, part, range(0, 50), age=31)
    use(tmp_path, part, range(10, 30), age=20)
    use(tmp_path, part, range(25, 35), age=1)
    done = clean(tmp_path)
    assert (done.rows_dropped, done.rows_kept) == (75, 25)
    assert done.bytes_freed > 0
    assert not part.exists()
    assert keys_of(tmp_path) == KEYS[10:35]
    assert clean(tmp_path).rows_dropped == 0
    assert clean(tmp_path, later=11).rows_kept == 10  # the uses went along into the new part
    assert keys_of(tmp_path) == KEYS[25:35]
    assert clean(tmp_path, later=30).rows_kept == 0
    assert verify_store(tmp_path) == []
    assert [path.name for path in tmp_path.glob("part-*")] == []


def test_young_answers_stay_without_any_use(tmp_path: Path) -> None:
    filled(tmp_path, 10, age=29)
    assert clean(tmp_path).rows_kept == 10
    assert clean(tmp_path, keep=None, later=10_000).rows_kept == 10
    assert clean(tmp_path, later=2).rows_dropped == 10


def test_every_job_has_its_own_retention(tmp_path: Path) -> None:
    (part,) = filled(tmp_path, 6)
    use(tmp_path, part, [0], 50, UsingResult("/other", "", 60))
    use(tmp_path, part, [1], 50, UsingResult("/other", "", None))
    use(tmp_path, part, [2], 50, UsingResult("/other", "", 40))
    use(tmp_path, part, [3], 20, UsingResult(ME.job, "", 10))
    use(tmp_path, part, [4], 20, UsingResult(ME.job, "", 30))
    clean(tmp_path, keep=25)
    assert keys_of(tmp_path) == [KEYS[n] for n in (0, 1, 3, 4)]
    clean(tmp_path, keep=15)
    assert keys_of(tmp_path) == KEYS[:2]


def test_a_result_found_published_again_uses_its_last_rows_again(tmp_path: Path) -> None:
    (part,) = filled(tmp_path / "c", 4)
    marker = tmp_path / "published.json"
    marker.touch()
    os.utime(marker, (NOW - DAY, NOW - DAY))
    user = UsingResult(ME.job, str(marker), 30)
    use(tmp_path / "c", part, [0, 1], 60, user)
    use(tmp_path / "c", part, [1, 2], 40, user)
    clean(tmp_path / "c")
    assert keys_of(tmp_path / "c") == KEYS[1:3]
    marker.unlink()
    assert clean(tmp_path / "c", later=25).rows_kept == 2  # rows of a merged part count as kept
    assert clean(tmp_path / "c", later=31).rows_kept == 0


def test_a_result_that_is_published_again_uses_no_rows_of_its_older_version(tmp_path: Path) -> None:
    """Its older version had another `cache.keep`."""
    (part,) = filled(tmp_path / "c", 4, age=400)
    marker = tmp_path / "published.json"
    marker.touch()
    os.utime(marker, (NOW, NOW))
    use(tmp_path / "c", part, [0, 1], 300, UsingResult(ME.job, str(marker), 60))
    use(tmp_path / "c", part, [1, 2], 40, UsingResult(ME.job, str(marker), 30))
    use(
        tmp_path / "c", part, [1, 2], 40, UsingResult(ME.job, str(marker), None)
    )  # noted twice: both are the newest
    clean(tmp_path / "c")
    assert keys_of(tmp_path / "c") == KEYS[1:3]


def test_small_adjacent_parts_are_merged_in_order(tmp_path: Path) -> None:
    filled(tmp_path, 100, 200, 300, age=1)
    done = clean(tmp_path)
    assert (done.parts_before, done.parts_after, done.rows_dropped) == (3, 1, 0)
    assert keys_of(tmp_path) == KEYS[:600]
    filled(tmp_path, 50, age=1)
    assert keys_of(tmp_path) == KEYS[:650]
    assert clean(tmp_path).parts_after == 1
    assert keys_of(tmp_path) == KEYS[:650]


def test_the_first_of_two_answers_to_a_key_stays_first(tmp_path: Path) -> None:
    """A part that is too large to merge is between the two."""
    with CompletionStore(tmp_path / "c") as store:
        for batch in (
            [answer(KEYS[0], 1)],
            [answer(KEYS[1], 1)],
            [answer(k) for k in KEYS[10:30]],
            [answer(KEYS[0], 2)],
            [answer(KEYS[1], 2)],
        ):
            store.append(batch)
            store.commit()
    done = clean_store(tmp_path / "c", RetentionRule(30), replace(THOROUGH, small_rows=10))
    assert (done.parts_before, done.parts_after) == (5, 3)
    with CompletionStore(tmp_path / "c") as store:
        rows = [row for part in store.parts() for row in pq.read_table(part).to_pylist()]
    assert [len(row["token_ids"]) for row in rows if row["key"] == KEYS[0]] == [1, 2]
    assert [len(row["token_ids"]) for row in rows if row["key"] == KEYS[1]] == [1, 2]


def test_after_a_run_only_parts_worth_copying_are_rewritten(tmp_path: Path) -> None:
    first, second = filled(tmp_path, 100, 100)
    use(tmp_path, first, range(80), 1)
    assert (
        clean(tmp_path, policy=CHEAP).rows_kept == 100
    )  # the second one goes, the first has a fifth too much
    assert first.exists()
    assert not second.exists()
    assert clean(tmp_path).rows_kept == 80
    (third,) = filled(tmp_path, 100)
    use(tmp_path, third, range(70), 1)
    assert clean(tmp_path, policy=CHEAP).rows_kept == 150


def test_many_publishes_make_one_file_of_uses(tmp_path: Path) -> None:
    (part,) = filled(tmp_path, 10, age=1)
    for night in range(40):
        use(tmp_path, part, [night % 10], 40 - night)
        clean(tmp_path, policy=CHEAP)
        assert len(use_files(tmp_path)) <= CHEAP.use_files
    clean(tmp_path)
    assert len(use_files(tmp_path)) == 1
    (times,) = read_uses(tmp_path).times[part.name].values()
    assert times.tolist() == [NOW - (10 - n) * DAY for n in range(10)]


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:60] + b"\xff" + data[61:], lambda data: b""]
)
def test_unreadable_uses_keep_everything_for_their_time(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    (part,) = filled(tmp_path, 10)
    use(tmp_path, part, range(5), 1)
    (noted,) = use_files(tmp_path)
    noted.write_bytes(damage(noted.read_bytes()))
    os.utime(noted, (NOW - DAY, NOW - DAY))
    assert clean(tmp_path).rows_kept == 10
    assert clean(tmp_path, later=30).rows_kept == 0
    assert use_files(tmp_path) == []


def test_a_damaged_part_is_left_alone_and_named(tmp_path: Path) -> None:
    first, second = filled(tmp_path, 50, 50)
    use(tmp_path, first, range(10), 1)
    use(tmp_path, second, range(10), 1)
    data = bytearray(second.read_bytes())
    data[len(data) // 3] ^= 1
    second.write_bytes(data)
    before = sorted(path.name for path in tmp_path.glob("part-*"))
    with pytest.raises(StorageError, match=f"{second.name}.*--verify"):
        clean(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("part-*")) == before


def test_nothing_is_removed_while_somebody_uses_the_store(tmp_path: Path) -> None:
    filled(tmp_path, 10)
    with CompletionStore(tmp_path) as store:
        with pytest.raises(Locked, match="using the stored answers"):
            clean(tmp_path)
        assert clean_store(tmp_path, RetentionRule(30, ME.job, NOW), dry_run=True).rows_dropped == 10
        assert len(store) == 10
    assert len(keys_of(tmp_path)) == 10


def test_cleaning_can_stop_between_two_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaning, "_PART_ROWS", 10)
    for part in filled(tmp_path, 20, 20, 20):
        use(tmp_path, part, range(10), 1)
    asked: list[int] = []
    done = clean_store(
        tmp_path,
        RetentionRule(30, ME.job, NOW),
        should_continue=lambda: len(asked) < 1 and not asked.append(1),
    )
    assert (done.rows_kept, done.parts_after) == (50, 3)
    assert len(keys_of(tmp_path)) == 50
    assert clean(tmp_path).rows_kept == 30


def test_the_rows_of_a_job_are_the_answers_that_its_result_is_made_of(tmp_path: Path) -> None:
    rows = mixed_rows(20, distinct=6)
    index, keys = write_index(tmp_path / "x", rows), keys_in(rows)
    with CompletionStore(tmp_path / "c") as store:
        store.append([failure(keys[0]), answer(KEYS[0]), answer(keys[1])])
        store.commit()
        store.append([answer(keys[0]), answer(keys[1], 1), *(answer(key) for key in keys[2:])])
        store.commit()
        found: dict[str, set[int]] = {}
        for part, numbers in join_answers(index.index_parts, store.parts(), tmp_path / "spill").used():
            found.setdefault(part, set()).update(numbers.tolist())
        first, second = (part.name for part in store.parts())
    assert found == {first: {2}, second: {0, *range(2, len(keys))}}
