"""The state folder: private, locked by one run at a time, refused when newer, swept when old."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from batchinfer.data.state import StateFolder
from batchinfer.errors import Locked, StorageError

HOLDER = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from batchinfer.data.state import StateFolder
with StateFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_it_is_a_private_hidden_sibling_of_the_results(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "a" / "res")
    with state.lock():
        assert state.path == tmp_path / "a" / ".batchinfer-res"
        assert stat.S_IMODE(state.path.stat().st_mode) == 0o700


def test_a_second_run_is_told_who_holds_the_lock(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "res")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(state.results)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(Locked, match=f"process {holder.pid} is running"), state.lock():
            pass
    finally:
        holder.kill()
        holder.communicate()
    with state.lock():  # the kernel released it
        assert state.lock_path.read_text() == f"{os.getpid()}\n"


def test_a_newer_state_is_refused(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "res")
    with state.lock():
        pass
    (state.path / "state.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(StorageError, match="state format 99"), state.lock():
        pass


def test_scratch_is_purged_but_for_what_is_kept(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "res")
    for name in ("one", "two"):
        (state.scratch_for(name) / "index").mkdir(parents=True)
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


def test_too_little_space_is_said_with_numbers(tmp_path: Path) -> None:
    state = StateFolder(tmp_path / "not" / "yet" / "res")
    state.check_space(1)
    with pytest.raises(StorageError, match=r"needs about 1 PiB of disk, [0-9.]+ [GT]iB are free"):
        state.check_space(1 << 50)


def test_too_little_space_differs_from_what_is_free_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it read: needs about 0.00 GiB of disk, 0.00 GiB are free."""
    state = StateFolder(tmp_path / "res")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4_300_000))
    with pytest.raises(StorageError, match=r"needs about 4\.1009 MiB of disk, 4\.1008 MiB are free"):
        state.check_space(4_300_100)


def test_a_shared_store_lies_where_the_cache_says(tmp_path: Path) -> None:
    assert StateFolder(tmp_path / "res", cache=tmp_path / "store").completions == tmp_path / "store"
