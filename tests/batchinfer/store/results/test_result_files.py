"""Result files are written by several threads: bytes do not depend on it, and a failure fails all of them."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchinfer.core.errors import StorageError
from batchinfer.core.request import Completion
from batchinfer.filesystem.durable import FileOps
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.state import StateFolder
from batchinfer.store.answers import completion_store
from batchinfer.store.results import result_files, result_rows, sorted_answers
from batchinfer.store.results.manifest import PublishSpec, read_manifest
from tests.batchinfer.store.small_index import (
    answer,
    bad_row,
    failure,
    good_row,
    key_of,
    published,
    published_files,
    small_index,
    write_index,
)
from tests.examples import everything, examples

Commits = Sequence[Sequence[Completion]]


@dataclass(frozen=True)
class Case:
    """`work`: a number per row, equal for duplicates, or None for an invalid row. `commits`: the answers of each part
    of the store.
    """

    work: list[int | None]
    commits: list[list[Completion]]
    rows_per_part: int
    rows_per_file: int

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [bad_row(i) if one is None else good_row(i, [one]) for i, one in enumerate(self.work)]

    def expected(self) -> list[tuple[str, str | None, str | None]]:
        """Return status, text and error of each row. The first completion of the best kind counts."""
        found: dict[bytes, Completion] = {}
        for one in (one for commit in self.commits for one in commit):
            if one.key not in found or _rank(one) < _rank(found[one.key]):
                found[one.key] = one
        return [_shown(None if one is None else found[key_of([one], 8)]) for one in self.work]


def _rank(one: Completion) -> int:
    return 0 if one.error is None else 1 + one.error.retryable


def _shown(one: Completion | None) -> tuple[str, str | None, str | None]:
    if one is None:
        return "error", None, "bad_json"
    if one.error is not None:
        return "error", None, one.error.code
    return "ok", " ".join(map(str, one.tokens.token_ids.tolist())), None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    work = draw(st.lists(st.none() | st.integers(0, 12), max_size=40))
    keys = [key_of([number], 8) for number in sorted({one for one in work if one is not None})]
    kinds = st.one_of(
        st.integers(0, 30).map(lambda length: lambda key: answer(key, length)),
        st.booleans().map(lambda again: lambda key: failure(key, again)),
    )
    others = [key_of([number], 8) for number in range(100, 103)]
    stored = [*keys, *draw(st.lists(st.sampled_from([*keys, *others]), max_size=12))]
    completions = [draw(kinds)(key) for key in draw(st.permutations(stored))]
    borders = sorted(draw(st.lists(st.integers(0, len(completions)), max_size=4)))
    parts = [completions[a:b] for a, b in zip([0, *borders], [*borders, len(completions)], strict=True)]
    return Case(work, parts, draw(st.integers(1, 15)), draw(st.integers(1, 15)))


def result_of(folder: Path, case: Case, threads: int, ops: FileOps | None = None) -> dict[str, bytes]:
    """Return the result of a case. In the second run in a folder, all answers are stored."""
    again = (folder / "x").exists()
    rows = case.rows
    index = (
        small_index(folder / "x", len(rows))
        if again
        else write_index(folder / "x", rows, rows_per_part=case.rows_per_part)
    )
    spec = PublishSpec("job", "1" * 64, (), 1, case.rows_per_file)
    state = StateFolder(folder / "res", ops=ops)
    published(folder, index, *([] if again else case.commits), spec=spec, state=state, threads=threads)
    return published_files(folder)


# All answers in one part of several row groups, more than are read at a time, some of them several times
ONE_PART = Case(
    [*range(12), None, *range(11, -1, -2)],
    [[answer(key_of([n], 8), n + 1) for n in (5, 100, 3, 11, 0, 8, 101, 1, 9, 4, 10, 2, 6, 7)]],
    5,
    6,
)


@settings(max_examples=examples(3, 12), deadline=None)
@example(ONE_PART)
@given(cases())
def test_the_bytes_equal_those_of_one_thread(case: Case) -> None:
    """For any rows and store, also with answers spilled to disk in many runs."""
    with TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(result_rows, "BATCH_ROWS", 7)
        patch.setattr(result_files, "BATCH_ROWS", 7)
        patch.setattr(completion_store, "GROUP_ROWS", 3)
        folder = Path(made)
        one = result_of(folder / "1", case, 1)
        manifest = read_manifest(Location.at(folder / "1/res"))
        assert manifest is not None
        rows = [
            (row["status"], row["generated_text"], row["error_code"])
            for file in manifest.files
            for row in pq.read_table(folder / "1/res" / file.name).to_pylist()
        ]
        assert rows == case.expected()
        patch.setattr(result_files, "SPAN_ROWS", 1)
        patch.setattr(sorted_answers, "RUN_BYTES", 300)
        for threads, memory in ((2, 1 << 20), (7, 0)):
            patch.setattr(result_rows, "working_memory", lambda memory=memory: memory)
            assert result_of(folder / str(threads), case, threads) == one
            assert not list(folder.rglob("*.arrow")), "spill files are removed"


class FailsIn(FileOps):
    """Fails at the n-th operation of one file. Operations of other threads on other files do not count."""

    def __init__(self, name: str, number: int) -> None:
        self._name, self._left, self.failed = name, number, ""
        self._fds: dict[int, str] = {}

    def _step(self, name: str | None, what: str) -> None:
        if name != self._name:
            return
        self._left -= 1
        if self._left == -1:
            self.failed = what
            raise OSError(errno.EIO, "broken")

    def open(self, path: Path) -> int:
        self._step(path.name, "open")
        fd = super().open(path)
        self._fds[fd] = path.name
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        self._step(self._fds.get(fd), "write")
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        self._step(self._fds.get(fd), "fsync")
        super().fsync(fd)

    def close(self, fd: int) -> None:
        name = self._fds.pop(fd, None)
        super().close(fd)
        self._step(name, "close")

    def rename(self, source: Path, target: Path) -> None:
        self._step(source.name, "rename")
        super().rename(source, target)


def test_a_disk_that_fails_in_any_operation_of_any_file_fails_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_files, "SPAN_ROWS", 1)
    keys = [key_of([number], 8) for number in range(12)]
    case = Case(list(range(12)), [[answer(key) for key in keys]], 5, 3)
    whole = result_of(tmp_path / "whole", case, 1)
    failed = []
    for file in (0, 2) if everything() else (2,):
        for number in range(8):
            folder = tmp_path / f"{file}-{number}"
            ops = FailsIn(f"{file:05d}.parquet.tmp", number)
            with suppress(StorageError):
                result_of(folder, case, 3, ops)
            assert (folder / "res").exists() == (not ops.failed), f"{ops.failed} of file {file}"
            assert not [one for one in threading.enumerate() if one.name.startswith("result file")]
            failed.append(ops.failed)
            assert result_of(folder, case, 1) == whole, "by the same command after the failure"
    assert set(failed) == {"open", "write", "fsync", "close", "rename", ""}
