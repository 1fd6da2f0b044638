"""Parts: they exist through their records, contain the appended answers, and are recomputed after any damage."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import StorageError
from batchinfer.store.answers import completion_store
from batchinfer.store.answers.completion_store import (
    COMPLETION_SCHEMA,
    MOST_PART_ROWS,
    PART_ROWS,
    CompletionStore,
)
from batchinfer.store.results.verify import verify_store
from tests.batchinfer.filesystem.failing_ops import FailingOps, ShortWrites
from tests.batchinfer.store.small_index import answer, failure

KEYS = [bytes([n]) * 32 for n in range(20)]


def filled(path: Path, *sizes: int) -> None:
    with CompletionStore(path) as store:
        start = 0
        for size in sizes:
            store.append(answer(key) for key in KEYS[start : start + size])
            store.commit()
            start += size


def test_what_was_committed_is_there_again(tmp_path: Path) -> None:
    with CompletionStore(tmp_path) as store:
        store.append([answer(KEYS[0], 3), failure(KEYS[1]), answer(KEYS[2], 0)])
        assert (store.pending, len(store)) == (3, 0)
        assert store.commit() == 3
        assert store.commit() == 0
    with CompletionStore(tmp_path, verify=True) as store:
        assert len(store) == 3
        table = pq.read_table(store.parts()[0], page_checksum_verification=True)
    assert table.schema.equals(COMPLETION_SCHEMA)
    assert [len(tokens) for tokens in table["token_ids"].to_pylist()] == [3, 0, 0]
    assert table["error_code"].to_pylist() == [None, "nan_logits", None]
    record = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert set(record) == {"format", "rows", "bytes", "sha256", "numerics"}


def test_it_commits_by_rows_or_by_seconds(tmp_path: Path) -> None:
    now = [0.0]
    with CompletionStore(tmp_path, rows=3, seconds=10, clock=lambda: now[0]) as store:
        store.append([answer(KEYS[0])])
        assert store.maybe_commit() == 0
        now[0] = 10.0
        assert store.maybe_commit() == 1
        store.append(answer(key) for key in KEYS[1:4])
        assert store.maybe_commit() == 3
        assert store.maybe_commit() == 0


def test_rows_that_finish_within_a_second_make_one_part(tmp_path: Path) -> None:
    now = [0.0]
    with CompletionStore(tmp_path, seconds=30, clock=lambda: now[0]) as store:
        store.append(answer(KEYS[0]) for _ in range(PART_ROWS))
        assert store.maybe_commit() == 0
        now[0] = 0.9
        store.append([answer(KEYS[1])])
        assert store.maybe_commit() == 0
        now[0] = 1.0
        assert store.maybe_commit() == PART_ROWS + 1
        store.append(answer(KEYS[2]) for _ in range(PART_ROWS - 1))
        now[0] = 3.0
        assert store.maybe_commit() == 0, "one second is too early for a commit"
        now[0] = 31.0
        assert store.maybe_commit() == PART_ROWS - 1
        store.append(answer(KEYS[3]) for _ in range(MOST_PART_ROWS))
        assert store.maybe_commit() == MOST_PART_ROWS


def test_a_part_without_a_record_does_not_exist(tmp_path: Path) -> None:
    filled(tmp_path, 2, 3)
    next(tmp_path.glob("part-0000000001-*.json")).unlink()
    (tmp_path / "part-0000000007-0a1b2c3d.parquet.tmp").write_bytes(b"PAR1")
    with CompletionStore(tmp_path) as store:
        assert len(store) == 2
        assert len(list(tmp_path.glob("part-*"))) == 2


@pytest.mark.parametrize("record", ["{", "[]", '{"format": 1}', '{"format":"x"}'])
def test_an_unreadable_record_costs_its_part(tmp_path: Path, record: str) -> None:
    filled(tmp_path, 2, 3)
    next(tmp_path.glob("part-0000000001-*.json")).write_text(record)
    with CompletionStore(tmp_path) as store:
        assert len(store) == 2
        assert [d.reason for d in store.discarded] == ["unreadable record"]


def test_a_truncated_part_is_discarded_and_a_flipped_bit_is_found_by_verify(tmp_path: Path) -> None:
    filled(tmp_path, 2, 3)
    first, second = sorted(tmp_path.glob("*.parquet"))
    second.write_bytes(second.read_bytes()[:-1])
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 1
    first.write_bytes(data)
    assert {problem.file.local for problem in verify_store(tmp_path)} == {first, second}
    with CompletionStore(tmp_path) as store:
        assert len(store) == 2
    with CompletionStore(tmp_path, verify=True) as store:
        assert len(store) == 0
        assert "sha256" in store.discarded[0].reason


def test_a_newer_record_is_refused(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    path = next(tmp_path.glob("*.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(StorageError, match="record format 2"):
        CompletionStore(tmp_path)
    assert path.exists()


def test_a_run_alongside_another_removes_no_files(tmp_path: Path) -> None:
    with CompletionStore(tmp_path):
        being_written = tmp_path / "part-0000000000-0a1b2c3d.parquet.tmp"
        being_written.touch()
        uses = tmp_path / "uses" / f"{'0a' * 16}.parquet.tmp"
        uses.parent.mkdir()
        uses.touch()
        uses.with_name("theirs.parquet.tmp").touch()
        with CompletionStore(tmp_path):
            assert being_written.exists()
            assert uses.exists()
    with CompletionStore(tmp_path):
        assert not being_written.exists()
        assert [path.name for path in uses.parent.iterdir()] == ["theirs.parquet.tmp"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE])
def test_a_failing_disk_leaves_no_part_and_the_rows_pending(tmp_path: Path, code: int) -> None:
    with CompletionStore(tmp_path / "probe", ops=(probe := FailingOps())) as store:
        store.append([answer(KEYS[0])])
        opened = probe.count
        store.commit()
    for step in range(opened, probe.count):
        folder = tmp_path / f"{code}-{step}"
        with CompletionStore(folder, ops=FailingOps(step, code)) as store:
            store.append([answer(KEYS[0])])
            with pytest.raises(StorageError, match=errno.errorcode[code]) as caught:
                store.commit()
            assert str(folder) in str(caught.value)
            assert (store.pending, len(store)) == (1, 0)
            assert store.commit() == 1
        with CompletionStore(folder, verify=True) as store:
            assert len(store) in (1, 2)  # 2: the record was in place, only the folder's fsync failed


def test_short_writes_are_carried_on(tmp_path: Path) -> None:
    with CompletionStore(tmp_path, ops=ShortWrites()) as store:
        store.append(answer(key) for key in KEYS)
        store.commit()
    assert verify_store(tmp_path) == []


def test_files_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    """Other programs may write to the folder of `cache.path`, and Spark and DuckDB also number their parts."""
    names = ("part-00000.parquet", "part-00000-c000.json", "part-9f2c-00000.parquet", "part-x.tmp")
    for name in names:
        (tmp_path / name).write_text("theirs")
    filled(tmp_path, 2)
    filled(tmp_path, 1)
    assert {name: (tmp_path / name).read_text() for name in names} == dict.fromkeys(names, "theirs")


def test_the_first_answer_stays_first_after_later_commits(tmp_path: Path) -> None:
    """Runs for several dates share a store. A slow run may repeat a published answer."""
    with CompletionStore(tmp_path) as slow, CompletionStore(tmp_path) as fast:
        for key in KEYS[:3]:
            fast.append([answer(key, 3)])
            fast.commit()
        assert slow.parts() == []
        slow.append([answer(KEYS[2], 5)])
        slow.commit()
        slow.refresh()
        assert slow.parts()[:3] == fast.parts(), "it publishes without the first answers"
        (later,) = slow.parts()[3:]
        assert pq.read_table(later)["key"].to_pylist() == [KEYS[2]]
    with CompletionStore(tmp_path) as both:
        assert both.parts() == [*fast.parts(), later]


def test_two_processes_never_use_the_same_part_number(tmp_path: Path) -> None:
    """The second one waits until the record of the first exists."""
    with CompletionStore(tmp_path) as one, CompletionStore(tmp_path) as other:
        other.append([answer(KEYS[0])])
        committed = threading.Thread(target=other.commit)
        with one._lock.lock_order():
            committed.start()
            committed.join(0.3)
            assert committed.is_alive()
            assert list(tmp_path.glob("part-*")) == []
        committed.join(30)
        assert len(other) == 1


def test_parts_are_numbered_without_listing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unrecorded part of another process is found, too."""
    listed: list[Path] = []
    usual = completion_store._record_names
    monkeypatch.setattr(completion_store, "_record_names", lambda path: listed.append(path) or usual(path))

    def number(store: CompletionStore, key: bytes) -> int:
        store.append([answer(key)])
        store.commit()
        return int(store.parts()[-1].name.split("-")[1])

    with CompletionStore(tmp_path) as one, CompletionStore(tmp_path) as other:
        found = [number(one, KEYS[0])]
        listed.clear()
        found += [number(one, KEYS[1]), number(other, KEYS[2]), number(one, KEYS[3])]
        assert found == [0, 1, 2, 3]
        assert listed == []
        last = one.parts()[-1]
        for suffix in (".parquet", ".json"):
            later = last.with_name("part-0000000041-0123abcd.parquet").with_suffix(suffix)
            later.write_bytes(last.with_suffix(suffix).read_bytes())
        assert number(one, KEYS[4]) == 42
        (tmp_path / "order.lock").write_text("damaged")
        assert number(one, KEYS[5]) == 43
        assert len(listed) == 2
