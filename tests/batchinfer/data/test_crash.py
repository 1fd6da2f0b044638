"""Killed or failed at any file operation, the same command gives the bytes of an undisturbed run."""

from __future__ import annotations

import errno
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from batchinfer.data.durable import FileOps
from batchinfer.data.verify import verify_result
from batchinfer.errors import StorageError
from tests.batchinfer.data import crash_job
from tests.batchinfer.data.failing_ops import FailingOps

REPOSITORY = Path(__file__).parents[3]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "res").iterdir())}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, bytes], int]:
    """The older result, the newer one, and how many operations the job makes."""
    folder = tmp_path_factory.mktemp("undisturbed")
    index = crash_job.prepare(folder)
    older = contents(folder)
    counting = FailingOps()
    crash_job.run_job(folder, index, counting)
    return older, contents(folder), counting.count


Undisturbed = tuple[dict[str, bytes], dict[str, bytes], int]


def test_the_job_makes_every_kind_of_operation(tmp_path: Path) -> None:
    index = crash_job.prepare(tmp_path)
    counting = FailingOps()
    crash_job.run_job(tmp_path, index, counting)
    made = {entry.split()[0] for entry in counting.log}
    assert {"open", "write", "fsync", "close", "rename", "exchange", "mkdir", "touch", "fsync_folder"} <= made


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failure_at_some_operations(tmp_path: Path, undisturbed: Undisturbed, code: int) -> None:
    _fail_each(tmp_path, undisturbed, code, range(code % 19, undisturbed[2], 19))


@pytest.mark.slow
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES])
def test_a_failure_at_every_operation(tmp_path: Path, undisturbed: Undisturbed, code: int) -> None:
    _fail_each(tmp_path, undisturbed, code, range(undisturbed[2]))


def _fail_each(root: Path, undisturbed: Undisturbed, code: int, numbers: range) -> None:
    older, newer, _ = undisturbed
    for number in numbers:
        folder = root / str(number)
        index = crash_job.prepare(folder)
        ops = FailingOps(number, code)
        with suppress(StorageError):  # any other exception fails; an exchange that cannot be made is a rename
            crash_job.run_job(folder, index, ops)
        assert contents(folder) in (older, newer), (
            f"operation {number}, {ops.log[number]}: neither old nor new"
        )
        crash_job.run_job(folder, index, FileOps())
        assert contents(folder) == newer, f"operation {number}, {ops.log[number]}"
        assert verify_result(folder / "res") == []


def test_kill_at_some_operations(tmp_path: Path, undisturbed: Undisturbed) -> None:
    _kill_each(tmp_path, undisturbed, step=13)


@pytest.mark.slow
def test_kill_at_every_operation(tmp_path: Path, undisturbed: Undisturbed) -> None:
    _kill_each(tmp_path, undisturbed, step=1)


def _kill_each(root: Path, undisturbed: Undisturbed, step: int) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.batchinfer.data.crash_job",
        str(root),
        str(undisturbed[2]),
        str(step),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    numbers = range(0, undisturbed[2], step)
    assert done.stdout.splitlines() == [f"{number} killed" for number in numbers]
    for number in numbers:
        assert contents(root / str(number)) == undisturbed[1], f"operation {number}"
