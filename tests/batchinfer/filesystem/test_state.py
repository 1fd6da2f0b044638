"""The state folder: private, locked by one run, refused if a newer version wrote it, cleaned when old."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from batchinfer.core.errors import Locked, StorageError
from batchinfer.filesystem.state import StateFolder
from batchinfer.store.results.find_state import find_state
from tests.examples import examples

HOLDER = """
import sys, time
from pathlib import Path
from batchinfer.filesystem.state import StateFolder
with StateFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_it_is_a_private_hidden_sibling_of_the_results(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "a" / "res")
    with state.lock():
        assert state.path == tmp_path / "a" / ".batchinfer-res"
        assert stat.S_IMODE(state.path.stat().st_mode) == 0o700


def test_a_second_run_reports_the_owner_of_the_lock(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "res")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(state.results)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Locked, match=f"process {holder.pid} is running"):
            made(state)
    finally:
        holder.kill()
        holder.communicate()
    with state.lock():  # the kernel released it
        assert state.lock_path.read_text() == f"{os.getpid()}\n"


def made(state: StateFolder) -> StateFolder:
    with state.lock():
        return state


def test_a_newer_state_is_refused(tmp_path: Path) -> None:
    state = made(StateFolder(tmp_path / "res"))
    (state.path / "state.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(StorageError, match=r"state format 99.*which deletes its stored answers"):
        made(state)


@pytest.mark.parametrize(
    "damage",
    [b"", b'{"form', b"\x00\xff", b"[1]", b"{}", b'{"format": null}', b'{"format": true}', b'{"format": "1"}',
     b'{"format": -1}', b"[" * 100_000],
    ids=lambda damage: repr(damage[:20]),
)  # fmt: skip
def test_a_damaged_state_file_is_written_again(damage: bytes, tmp_path: Path) -> None:
    state = made(StateFolder(tmp_path / "res"))
    marker, answers = state.path / "state.json", state.path / "completions"
    answers.mkdir()
    whole = marker.read_bytes()
    marker.write_bytes(damage)
    state.refuse_newer()
    assert marker.read_bytes() == damage
    with state.lock():
        assert marker.read_bytes() == whole
    assert answers.is_dir()


def test_a_folder_in_place_of_the_state_file_is_named(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "res")
    (state.path / "state.json").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"state\.json: is a folder.* remove it .* keeps all"):
        made(state)


@pytest.mark.parametrize("gate", [True, False], ids=["", "without state.lock"])
def test_is_running_in_a_read_only_state(gate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, real = StateFolder(tmp_path / "res"), os.open

    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return real(path, flags, mode)

    with state.lock():
        if not gate:
            (state.job / "state.lock").unlink()
        monkeypatch.setattr(os, "open", read_only)
        assert state.is_running(state.path)
    assert not state.is_running(state.path)


def test_scratch_is_purged_except_for_kept_files(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "res")
    for name in ("one", "two"):
        (state.scratch / name / "index").mkdir(parents=True)
    state.purge_scratch(keep="two")
    assert [path.name for path in state.scratch.iterdir()] == ["two"]
    state.purge_scratch()
    assert not list(state.scratch.iterdir())


def test_old_generations_go_after_an_hour(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "res")
    (state.generations / "g1").mkdir(parents=True)
    assert state.remove_old_generations() == 0
    assert state.remove_old_generations(now=time.time() + 3601) == 1
    assert not list(state.generations.iterdir())


def test_missing_disk_space_is_reported_with_enough_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateFolder(tmp_path / "not" / "yet" / "res")
    state.check_space(1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4_300_000))
    with pytest.raises(StorageError, match=r"needs about 4\.1009 MiB of disk, 4\.1008 MiB are free"):
        state.check_space(4_300_100)


def dated(folder: Path, day: str, path: str = "res/{}") -> StateFolder:
    return StateFolder(folder / path.format(day), root=folder / "res")


def test_results_of_one_root_share_what_belongs_to_the_job(tmp_path: Path) -> None:
    first, second = dated(tmp_path, "2026-01-01"), dated(tmp_path, "2026-01-02")
    assert first.completions == second.completions == tmp_path / ".batchinfer-res" / "completions"
    assert first.fingerprints == second.fingerprints
    for name in ("lock_path", "scratch", "staging", "generations", "published"):
        mine, theirs = getattr(first, name), getattr(second, name)
        assert mine != theirs
        assert mine.parent == first.path == tmp_path / ".batchinfer-res" / "results" / "res%2F2026-01-01"
    with first.lock(), second.lock():
        with pytest.raises(Locked, match="2026-01-01"):
            made(dated(tmp_path, "2026-01-01"))
        assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    assert not (tmp_path / "res").exists()


def test_the_root_itself_keeps_the_layout_of_a_job_without_a_date(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "res", root=tmp_path / "res")
    assert state.path == state.job == tmp_path / ".batchinfer-res"
    assert StateFolder(tmp_path / "res", cache=tmp_path / "store").completions == tmp_path / "store"


def test_a_path_too_long_for_a_name_has_one_of_its_own(tmp_path: Path) -> None:
    states = [StateFolder(tmp_path / f"{'d' * 150}/{'é' * 60}/{n}", root=tmp_path / "r") for n in range(2)]
    with states[0].lock(), states[1].lock():
        assert states[0].path != states[1].path


def test_a_year_of_nights_leaves_the_state_of_a_day(tmp_path: Path) -> None:
    now = time.time()
    for night in range(examples(60, 365), 0, -1):
        state = dated(tmp_path, f"night-{night}")
        with state.lock():
            (state.scratch / "index").mkdir(parents=True)  # as an interrupted run leaves it
            (state.generations / "old").mkdir(parents=True)
        os.utime(state.lock_path, times=(now - night * 86400.0 + 3600, now - night * 86400.0 + 3600))
        state.remove_idle(now - (night - 1) * 86400.0)
        assert len(list((state.job / "results").iterdir())) <= 2
    assert [path.name for path in (state.job / "results").iterdir()] == ["res%2Fnight-1"]


def test_what_a_run_holds_is_not_idle(tmp_path: Path) -> None:
    held, other = dated(tmp_path, "2026-01-01"), dated(tmp_path, "2026-01-02")
    with held.lock():
        with other.lock():
            assert [path.name for path in other.idle_parts(time.time() + 90_000)] == [held.path.name]
            assert other.remove_idle(time.time() + 90_000) == 0
        assert held.path.is_dir()
    assert other.remove_idle(time.time() + 90_000) == 1
    assert not held.path.exists()
    with held.lock():  # and it can begin again
        assert held.lock_path.exists()


@pytest.mark.parametrize(("path", "root"), [
    ("out/res", "out/res"),
    ("out/res/2026-01-02", "out/res"),
    ("out/res-2026-01-02", "out/res"),
    ("out/2026-01-02/res", "out/res"),
    ("out/res-first-20", "out/res"),
    ("out/2026-01-02", "out/my-job"),
    ("2025-12-31/x/res/2026-01-02", "2025-12-31/x/res"),
])  # fmt: skip
def test_a_result_leads_to_the_state_of_its_job(tmp_path: Path, path: str, root: str) -> None:
    state = made(StateFolder(tmp_path / path, root=tmp_path / root))
    found = find_state(tmp_path / path)
    assert (found.path, found.job, found.root) == (state.path, state.job, tmp_path / root)
    assert find_state(tmp_path / "elsewhere" / "r").path == tmp_path / "elsewhere" / ".batchinfer-r"


def test_a_result_of_a_night_long_ago_leads_there_too(tmp_path: Path) -> None:
    made(dated(tmp_path, "2026-01-02"))
    assert find_state(tmp_path / "res" / "2025-01-02").completions == tmp_path / ".batchinfer-res/completions"


def test_results_on_another_disk_than_the_state(tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir() or shm.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second disk")
    with TemporaryDirectory(dir=shm) as other:
        (tmp_path / "res").symlink_to(other)
        assert dated(tmp_path, "2026-01-02").is_on_other_disk()
        assert not dated(tmp_path, "2026-01-02", "res-{}").is_on_other_disk()
