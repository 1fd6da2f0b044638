"""Files that the command line writes: protected files, and the state after a crash."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from batchinfer.core.errors import OutputConflict, StorageError
from batchinfer.filesystem.durable import DurableFile, FileOps, write_new
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.state import StateFolder
from batchinfer.input.files import list_inputs, would_read
from batchinfer.store.results.output_file import OutputFile, ProtectedFiles


class Killed(BaseException):
    """The simulated crash of the machine."""


class StopsAt(FileOps):
    """Raises instead of executing one operation."""

    def __init__(self, name: str, error: BaseException) -> None:
        self._name, self._error = name, error

    def __getattribute__(self, name: str):  # type: ignore[no-untyped-def]
        if not name.startswith("_") and name == self._name:
            raise self._error
        return super().__getattribute__(name)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for folder in ("model", "data", "out/.batchinfer-res", "out/other"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("model/config.json", "data/in.jsonl", "job.yaml", "out/other/_manifest.json", "mine.jsonl"):
        (tmp_path / file).write_text(file)
    return tmp_path


def protected(place: Path) -> ProtectedFiles:
    return ProtectedFiles(
        (("the job file", place / "job.yaml"),),
        (("the model's folder", place / "model"), ("the result folder", place / "out/res")),
        (str(place / "data/*.jsonl"), str(place / "data/deep/**/*.json")),
        (place / "data/in.jsonl",),
    )


def out(place: Path, name: str, *, replace: bool = False, ops: FileOps | None = None) -> OutputFile:
    state = StateFolder(place / "out/res", ops=ops)
    return OutputFile(Location.at(place / name), "--to-openai", protected(place), state, replace=replace)


def write(file: OutputFile, text: str) -> None:
    with file.writing() as target:
        target.write(text.encode())


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize(("name", "words"), [
    ("data/in.jsonl", "an input of the job"),
    ("data/../data/in.jsonl", "an input of the job"),
    ("job.yaml", "the job file"),
    ("model/config.json", "the model's folder"),
    ("model/new.jsonl", "the model's folder"),
    ("out/res", "contains the result folder"),
    ("out/res/x.jsonl", "the result folder"),
    ("out", "contains the result folder"),
    ("data/new.jsonl", "the next run would read it"),
    ("data/deep/a/b/new.json", "the next run would read it"),
    ("out/.batchinfer-res/x", "a state folder"),
    ("out/other/x", "a result folder"),
    ("data", "is a folder"),
    ("nowhere/x.jsonl", "does not exist; create it"),
    ("soft", "an input of the job"),
    ("hard", "an input of the job"),
    ("soft-job", "the job file"),
    ("pipe", "no regular file"),
])  # fmt: skip
def test_what_is_never_written(place: Path, name: str, words: str, replace: bool) -> None:
    (place / "soft").symlink_to(place / "data/in.jsonl")
    (place / "soft-job").symlink_to("job.yaml")
    os.link(place / "data/in.jsonl", place / "hard")
    os.mkfifo(place / "pipe")
    with pytest.raises(OutputConflict, match=words):
        out(place, name, replace=replace).check()


def test_a_file_is_replaced_only_by_the_job_that_wrote_it(place: Path) -> None:
    with pytest.raises(OutputConflict, match=r"this job did not write it.*--replace"):
        out(place, "mine.jsonl").check()
    write(out(place, "mine.jsonl", replace=True), "first")
    write(out(place, "mine.jsonl"), "second")
    assert (place / "mine.jsonl").read_text() == "second"
    (place / "mine.jsonl").write_text("edited")
    with pytest.raises(OutputConflict, match="changed since"):
        out(place, "mine.jsonl").check()
    write(out(place, "another.jsonl"), "x")  # the record keeps both files
    (place / "mine.jsonl").write_text("second")
    out(place, "mine.jsonl").check()


@pytest.mark.parametrize("stop", ["rename", "fsync_folder"])
def test_after_a_crash_at_the_rename_the_file_counts_as_our_own(place: Path, stop: str) -> None:
    """The old file is in place before the rename, and the new file after it. The job wrote both."""
    write(out(place, "o.jsonl"), "older")
    file = out(place, "o.jsonl", ops=StopsAfter(1, stop))
    with pytest.raises(Killed):
        write(file, "newer")
    assert (place / "o.jsonl").read_text() == ("older" if stop == "rename" else "newer")
    out(place, "o.jsonl").check()


class StopsAfter(FileOps):
    """Crashes at the n-th call (from 0) of an operation. The first calls write the job's own record."""

    def __init__(self, calls: int, name: str) -> None:
        self._left, self._stops = calls, name

    def _count(self, name: str) -> None:
        if name == self._stops:
            self._left -= 1
            if self._left < 0:
                raise Killed

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        super().rename(source, target)

    def fsync_folder(self, path: Path) -> None:
        self._count("fsync_folder")
        super().fsync_folder(path)


def of_night(place: Path, night: str, name: str) -> OutputFile:
    state = StateFolder(place / "out/res" / night, root=place / "out/res")
    return OutputFile(Location.at(place / name), "--to-openai", protected(place), state)


def test_two_results_of_a_job_write_the_same_file_whole(place: Path) -> None:
    """A regression: the second run deleted the first one's temporary file, and the first renamed a partial file."""
    first, second = of_night(place, "monday", "o.jsonl"), of_night(place, "tuesday", "o.jsonl")
    with second.writing() as late:
        late.write(b"x" * (2 << 20))  # more than the buffer in memory
        with first.writing() as early:
            early.write(b"monday's")
        assert (place / "o.jsonl").read_text() == "monday's"
        late.write(b"whole")
    assert (place / "o.jsonl").read_bytes() == b"x" * (2 << 20) + b"whole"
    first.check()
    assert not list(place.glob(".batchinfer-*.tmp"))


class Meanwhile(FileOps):
    """Calls a function once, immediately before the ledger is replaced and after it was read."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def rename(self, source: Path, target: Path) -> None:
        if target.name == "written.json" and self._call is not None:
            call, self._call = self._call, None
            call()
        super().rename(source, target)


def test_two_results_of_a_job_remember_both_their_files(place: Path) -> None:
    other = threading.Thread(target=lambda: write(of_night(place, "tuesday", "two.jsonl"), "tuesday's"))

    def start() -> None:
        other.start()
        other.join(0.3)  # enough time for a thread that is not blocked

    write(out(place, "one.jsonl", ops=Meanwhile(start)), "monday's")
    other.join()
    out(place, "one.jsonl").check()
    out(place, "two.jsonl").check()


def test_files_of_a_killed_run_are_removed_later(place: Path) -> None:
    killed = of_night(place, "monday", "o.jsonl").writing()
    killed.__enter__().write(b"half")
    tuesday = StateFolder(place / "out/res/tuesday", root=place / "out/res")
    with tuesday.lock():
        at_work = of_night(place, "tuesday", "o.jsonl").writing()
        at_work.__enter__().write(b"half")
        assert len(list(place.glob(".batchinfer-*.tmp"))) == 2
        of_night(place, "wednesday", "o.jsonl").probe()
        assert len(list(place.glob(".batchinfer-*.tmp"))) == 1  # the file of the running run
        at_work.__exit__(None, None, None)
    assert (place / "o.jsonl").read_text() == "half"


def test_what_was_put_there_while_the_job_ran_stays(place: Path) -> None:
    file = out(place, "late.jsonl")
    file.check()
    writing = file.writing()
    writing.__enter__().write(b"answers")
    (place / "late.jsonl").write_text("somebody else's")
    with pytest.raises(OutputConflict, match="did not write it"):
        writing.__exit__(None, None, None)
    assert (place / "late.jsonl").read_text() == "somebody else's"
    assert not list(place.glob(".batchinfer-*.tmp"))


def test_a_full_disk_is_seen_before_anything_runs(place: Path) -> None:
    full = StopsAt("write", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(StorageError, match="No space left"):
        out(place, "o.jsonl", ops=full).probe()
    with pytest.raises(
        StorageError, match=r"needs at least 4,096 PiB of disk, [0-9.]+ [GT]iB are free; make room"
    ):
        out(place, "o.jsonl").check_space(1 << 62)
    out(place, "o.jsonl").probe()
    assert not (place / "o.jsonl").exists()
    assert not list(place.glob(".batchinfer-*.tmp"))


def test_other_files_named_like_a_temporary_file_stay(place: Path) -> None:
    (place / "o.jsonl.tmp").write_text("mine")
    write(out(place, "o.jsonl"), "answers")
    write_new(place / "n.jsonl", [b"rows"], FileOps())
    (place / "p.jsonl.tmp").write_text("mine")
    write_new(place / "p.jsonl", [b"rows"], FileOps())
    assert (place / "o.jsonl.tmp").read_text() == (place / "p.jsonl.tmp").read_text() == "mine"


def test_a_new_file_replaces_no_existing_file(place: Path) -> None:
    (place / "dangling").symlink_to(place / "gone")
    for name in ("mine.jsonl", "dangling"):
        with pytest.raises(OutputConflict, match="is there already"):
            write_new(place / name, [b"x"], FileOps())

    def pieces():  # type: ignore[no-untyped-def]
        (place / "race").write_text("first")
        yield b"second"

    for ops in (FileOps(), StopsAt("link", OSError(errno.EPERM, "no hard links here"))):
        with pytest.raises(OutputConflict, match="race: is there already"):
            write_new(place / "race", pieces(), ops)
        assert (place / "race").read_text() == "first"
        (place / "race").unlink()
    file = DurableFile(place / "mine.jsonl", FileOps())
    with pytest.raises(OutputConflict, match="is there already"):
        file.commit_new()
    assert (place / "mine.jsonl").read_text() == "mine.jsonl"
    assert not list(place.glob(".batchinfer-*"))


def test_would_read_agrees_with_what_is_read(tmp_path: Path) -> None:
    names = ["a.jsonl", "b.txt", "d/a.jsonl", "d/e/c.json", "d/.h.jsonl", "x/y/z.ndjson.gz", "x/n.csvx"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    for pattern in ("a.jsonl", "*.jsonl", "d", "**/*.json*", "x/**", "*/*.jsonl", "d/**/c.json"):
        listed = {file.path for file in list_inputs(str(tmp_path / pattern), tmp_path, "jsonl")}
        told = {
            str(tmp_path / name) for name in names if would_read([str(tmp_path / pattern)], tmp_path / name)
        }
        assert listed <= told, pattern
        assert told - listed <= {str(tmp_path / "d/.h.jsonl")}, pattern
