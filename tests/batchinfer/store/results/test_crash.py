"""After a kill or failure at any file operation, the same command produces the bytes of an undisturbed run."""

from __future__ import annotations

import errno
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from batchinfer.core.errors import StorageError
from batchinfer.filesystem.durable import FileOps
from batchinfer.filesystem.location import Location
from batchinfer.store.results.verify import verify_result
from tests import warm_commands
from tests.batchinfer.filesystem.failing_ops import FailingOps
from tests.batchinfer.store.results import crash_clean, crash_job
from tests.examples import everything, first_of

REPOSITORY = Path(__file__).parents[4]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "res").iterdir())}


Undisturbed = tuple[dict[str, bytes], dict[str, bytes], int]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The older and the newer result, and the number of operations of the job."""
    folder = tmp_path_factory.mktemp("undisturbed")
    index = crash_job.prepare(folder)
    older = contents(folder)
    counting = FailingOps()
    crash_job.run_job(folder, index, counting)
    made = {entry.split()[0] for entry in counting.log}
    assert {"open", "write", "fsync", "close", "rename", "exchange", "mkdir", "touch", "fsync_folder"} <= made
    return older, contents(folder), counting.count


@pytest.mark.parametrize("code", first_of([errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES], 1))
def test_a_failure_at_any_operation(tmp_path: Path, undisturbed: Undisturbed, code: int) -> None:
    older, newer, count = undisturbed
    for number in range(count) if everything() else range(5, count, 28):
        folder = tmp_path / str(number)
        index = crash_job.prepare(folder)
        ops = FailingOps(number, code)
        with suppress(StorageError):  # any other exception fails; an exchange that cannot be made is a rename
            crash_job.run_job(folder, index, ops)
        assert contents(folder) in (older, newer), (
            f"operation {number}, {ops.log[number]}: neither old nor new"
        )
        crash_job.run_job(folder, index, FileOps())
        assert contents(folder) == newer, f"operation {number}, {ops.log[number]}"
        assert verify_result(Location.at(folder / "res")) == []


@pytest.mark.parametrize("threads", first_of([3, 1], 1))
def test_a_kill_at_any_operation(tmp_path: Path, undisturbed: Undisturbed, threads: int) -> None:
    numbers = range(0, undisturbed[2], 1 if everything() else 60)
    _killed_by("crash_job", tmp_path, numbers, threads)
    for number in numbers:
        assert contents(tmp_path / str(number)) == undisturbed[1], f"operation {number}"


def _killed_by(script: str, root: Path, numbers: range, threads: int | None = None) -> None:
    module = f"tests.batchinfer.store.results.{script}"
    command = [sys.executable, "-m", module, str(root), str(numbers.stop), str(numbers.step)]
    command += [] if threads is None else [str(threads)]
    done = warm_commands.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{number} killed" for number in numbers]


# --- cleaning the store


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The number of operations of cleaning, which drops, rewrites and merges."""
    folder = tmp_path_factory.mktemp("cleaned")
    crash_clean.prepare(folder)
    before = len(list(folder.glob("part-*.json")))
    counting = FailingOps()
    crash_clean.clean(folder, counting)
    crash_clean.check(folder)
    assert (before, len(list(folder.glob("part-*.json")))) == (8, 2)
    assert not {*crash_clean.DROPPED} & {*crash_clean.keys(folder)}
    assert {"open", "write", "fsync", "rename", "unlink", "fsync_folder"} <= {
        e.split()[0] for e in counting.log
    }
    return counting.count


@pytest.mark.parametrize("code", first_of([errno.ENOSPC, errno.EIO], 1))
def test_a_failure_at_any_operation_of_cleaning_loses_and_doubles_no_answer(
    tmp_path: Path, operations: int, code: int
) -> None:
    for number in range(0, operations, 1 if everything() else 10):
        folder = tmp_path / str(number)
        crash_clean.prepare(folder)
        with suppress(StorageError):
            crash_clean.clean(folder, FailingOps(number, code))
        crash_clean.check(folder)
        crash_clean.clean(folder, FileOps())
        crash_clean.check(folder)
        assert not {*crash_clean.DROPPED} & {*crash_clean.keys(folder)}, f"operation {number}"


def test_a_kill_at_any_operation_of_cleaning(tmp_path: Path, operations: int) -> None:
    numbers = range(0, operations, 1 if everything() else 53)
    _killed_by("crash_clean", tmp_path, numbers)
    for number in numbers:
        crash_clean.check(tmp_path / str(number))
        assert not {*crash_clean.DROPPED} & {*crash_clean.keys(tmp_path / str(number))}, f"operation {number}"
