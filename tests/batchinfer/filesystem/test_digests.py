"""A file's digest is computed once per state of the file, and recomputed after a change."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from batchinfer.filesystem import digests
from batchinfer.filesystem.digests import file_digests

OLD, NEW = b"one" * 100, b"two" * 100


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batchinfer" / "digests"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each file that is read whole."""
    seen: list[int] = []
    read = digests._sha256
    monkeypatch.setattr(digests, "_sha256", lambda file: (seen.append(1), read(file))[1])
    return seen


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that every file was written long ago."""
    monkeypatch.setattr(digests, "SETTLED_S", -1.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "a.parquet"
    path.write_bytes(OLD)
    return path


def digest_of(path: Path, *, fresh: bool = False) -> str:
    with file_digests(path.parent, fresh=fresh) as found:
        return found.of(path)


def test_a_file_is_read_once(file: Path, reads: list[int], settled: None) -> None:
    assert [digest_of(file) for _ in range(3)] == [sha256(OLD)] * 3
    assert len(reads) == 1
    file.parent.rename(file.parent.with_name("moved"))
    assert digest_of(file.parent.with_name("moved") / file.name) == sha256(OLD)


def in_place(path: Path) -> None:
    with path.open("r+b") as opened:
        opened.write(NEW)


def by_rename(path: Path) -> None:
    path.with_name("new").write_bytes(NEW)
    path.with_name("new").rename(path)


@pytest.mark.parametrize("change", [in_place, by_rename])
def test_a_file_changed_with_its_old_time(file: Path, settled: None, change: Callable[[Path], None]) -> None:
    assert digest_of(file) == sha256(OLD)
    before = file.stat()
    change(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digest_of(file) == sha256(NEW)


def test_the_digest_of_a_just_written_file_is_not_cached(file: Path, reads: list[int], cache: Path) -> None:
    """A second write within a tick of the file system's clock would not change its time."""
    assert [digest_of(file) for _ in range(2)] == [sha256(OLD)] * 2
    assert len(reads) == 2
    assert not cache.exists()


def test_a_change_while_reading_is_seen(file: Path, settled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    read = digests._sha256

    def meddled(opened: object) -> str:
        found = read(opened)
        in_place(file)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(digests, "_sha256", meddled)
        assert digest_of(file) == sha256(OLD)
    assert digest_of(file) == sha256(NEW)


def test_fresh_digests_replace_cached_ones(
    file: Path, reads: list[int], settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk error does not change a file's time."""
    digest_of(file)
    with monkeypatch.context() as patch:
        patch.setattr(digests, "_sha256", lambda opened: "rotten")
        assert digest_of(file) == sha256(OLD)
        assert digest_of(file, fresh=True) == "rotten"
    assert digest_of(file) == "rotten"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a.parquet": 1}', '{"a.parquet": [1, 2, 3, 4, 5, "x"]}'])
def test_an_unusable_cache_only_costs_time(
    file: Path, reads: list[int], settled: None, cache: Path, text: str
) -> None:
    digest_of(file)
    (memory,) = cache.iterdir()
    memory.write_text(text)
    assert [digest_of(file) for _ in range(2)] == [sha256(OLD)] * 2
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_costs_time_only(file: Path, settled: None, cache: Path) -> None:
    cache.parent.parent.write_text("a file")
    assert [digest_of(file) for _ in range(2)] == [sha256(OLD)] * 2


def test_unused_caches_are_removed(file: Path, settled: None, cache: Path) -> None:
    digest_of(file)
    (memory,) = cache.iterdir()
    os.utime(memory, (0, 0))
    other = file.parent.parent / "other" / "b"
    other.parent.mkdir()
    other.write_bytes(OLD)
    digest_of(other)
    assert memory not in cache.iterdir()
