"""Files of the last result are copied if the next result has them, too. The bytes are equal either way."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.filesystem.location import Location
from batchinfer.filesystem.state import StateFolder
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.results import publisher, result_files, result_rows
from batchinfer.store.results.join import join_answers
from batchinfer.store.results.manifest import PublishSpec, read_manifest
from batchinfer.store.results.publisher import publish
from batchinfer.store.results.result_files import StagedFile
from batchinfer.store.results.reuse import earlier_files, fingerprints
from batchinfer.store.results.verify import verify_result
from tests.batchinfer.store.small_index import answer, bad_row, decode, failure, good_row, key_of, write_index
from tests.examples import examples

PER_FILE, MOST_WORK = 4, 9
SPEC = PublishSpec("job", "1" * 64, (), 1, PER_FILE)
Damage = Callable[[Path], None]


@dataclass(frozen=True)
class Night:
    """`rows`: per row a number for its work and the value of its carried column; an invalid row has no work.
    `errors`: work whose stored answer is an error so far.
    """

    rows: tuple[tuple[int | None, str | None], ...]
    errors: frozenset[int] = frozenset()
    spec: PublishSpec = SPEC
    threads: int = 1
    trial: bool = False


def publish_night(
    root: Path, night: Night, results: Path, number: int, state: StateFolder | None = None
) -> dict[str, bytes]:
    """Publish a night's rows to `results`. All nights share a store."""
    work = [one for one, _ in night.rows]
    rows = [bad_row(i, True) if one is None else good_row(i, [one]) for i, one in enumerate(work)]
    carried = pa.table(
        {"kind": pa.array([value for _, value in night.rows], pa.string()).dictionary_encode()}
    )
    folder = results.parent / f"index-{number}"
    index = write_index(folder, rows, carried, rows_per_part=3 + number)
    state = state or StateFolder(results)
    with state.lock(), CompletionStore(root / "store") as store:
        keys = {one: key_of([one], 8) for one in work if one is not None}
        # the first of equal answers counts, and an answer replaces an error
        store.append(failure(key) for one, key in keys.items() if one in night.errors)
        store.append(answer(key) for one, key in keys.items() if one not in night.errors)
        store.commit()
        join = join_answers(index.index_parts, store.parts(), folder / "join")
        publish(index, join, night.spec, decode, state, threads=night.threads, remember=not night.trial)
    return {path.name: path.read_bytes() for path in sorted(results.iterdir())}


rows = st.tuples(st.none() | st.integers(0, MOST_WORK), st.sampled_from([None, "x", "y"]))


@st.composite
def nights(draw: st.DrawFn) -> list[Night]:
    """Draw some nights, each with a few edits of the previous night's rows."""
    found = [Night(tuple(draw(st.lists(rows, max_size=14))), draw(st.frozensets(st.integers(0, MOST_WORK))))]
    for _ in range(draw(st.integers(1, 3))):
        now = [*found[-1].rows]
        for _ in range(draw(st.integers(0, 2))):
            at = draw(st.integers(0, len(now)))
            now[at : at + draw(st.integers(0, 1))] = draw(st.lists(rows, max_size=1))
        left = found[-1].errors - draw(st.frozensets(st.integers(0, MOST_WORK)))
        spec = replace(SPEC, rows_per_file=draw(st.sampled_from([PER_FILE, PER_FILE, 5])))
        spec = replace(spec, identity=draw(st.sampled_from([SPEC.identity, SPEC.identity, "2" * 64])))
        found.append(Night(tuple(now), left, spec, draw(st.integers(1, 3))))
    return found


def spoil(path: Path, how: str) -> None:
    """Damage a published file as a user might."""
    if how == "removed":
        path.unlink()
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "longer":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        before, data = path.stat(), bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


HOW = ("removed", "a folder", "cut", "longer", "changed in place")


@settings(max_examples=examples(3, 150), deadline=None)
@given(nights(), st.sampled_from([None, None, *HOW[2:]]), st.integers(0, 3))
def test_the_bytes_equal_those_of_a_fresh_publication(
    found: list[Night], how: str | None, which: int
) -> None:
    """Publish the nights in order, and each also to an empty folder. One file is damaged between two nights."""
    with TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        for module in (result_rows, result_files, fingerprints):
            patch.setattr(module, "BATCH_ROWS", 3)
        patch.setattr(result_files, "SPAN_ROWS", PER_FILE)
        root = Path(made)
        for number, night in enumerate(found):
            files = sorted((root / "res").glob("*.parquet"))
            if how is not None and which < len(files):
                spoil(files[which], how)
            got = publish_night(root, night, root / "res", number)
            assert got == publish_night(root, night, root / f"fresh-{number}/res", number)
            assert verify_result(Location.at(root / "res")) == []


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the copied files."""
    found: list[int] = []
    copy = earlier_files.EarlierFiles.copy

    def noted(self: earlier_files.EarlierFiles, number: int, *rest: object) -> StagedFile | None:
        file = copy(self, number, *rest)  # type: ignore[arg-type]
        found.extend([] if file is None else [number])
        return file

    monkeypatch.setattr(publisher.EarlierFiles, "copy", noted)
    return found


BASE = Night(tuple((n % MOST_WORK, "x") for n in range(14)), frozenset({6}))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("night", "expected"), [
    pytest.param(BASE, [0, 1, 2, 3], id="nothing"),
    pytest.param(replace(BASE, rows=(*BASE.rows, (20, "z"))), [0, 1, 2], id="a row added"),
    pytest.param(replace(BASE, rows=(*BASE.rows[:5], (20, "x"), *BASE.rows[6:])), [0, 2, 3], id="work"),
    pytest.param(replace(BASE, rows=(*BASE.rows[:8], (8, "y"), *BASE.rows[9:])), [0, 1, 3], id="a value"),
    pytest.param(replace(BASE, errors=frozenset()), [0, 2, 3], id="an error that was cured"),
    pytest.param(replace(BASE, rows=BASE.rows[1:]), [], id="the first row removed"),
    pytest.param(replace(BASE, spec=replace(SPEC, identity="2" * 64)), [], id="settings"),
])  # fmt: skip
def test_files_without_a_change_are_copied(
    tmp_path: Path, copied: list[int], night: Night, expected: list[int]
) -> None:
    first = publish_night(tmp_path, BASE, tmp_path / "res", 0)
    assert copied == []
    manifest = read_manifest(Location.at(tmp_path / "res"))
    assert manifest is not None
    assert (manifest.rows, manifest.errors, manifest.retryable) == (14, 1, 1)
    second = publish_night(tmp_path, night, tmp_path / "res", 1)
    assert copied == expected
    assert second == publish_night(tmp_path, night, tmp_path / "fresh/res", 2)
    assert (first == second) == (night is BASE)
    old = [
        path
        for path in (tmp_path / ".batchinfer-res").rglob("part-*-0*.parquet")
        if "generations" in str(path)
    ]
    inodes = {path.stat().st_ino for path in old}
    assert inodes.isdisjoint(path.stat().st_ino for path in (tmp_path / "res").iterdir()), "no hard links"


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", HOW)
def test_a_changed_file_is_written_again(tmp_path: Path, copied: list[int], how: str) -> None:
    first = publish_night(tmp_path, BASE, tmp_path / "res", 0)
    spoil(sorted((tmp_path / "res").glob("*.parquet"))[1], how)
    assert publish_night(tmp_path, BASE, tmp_path / "res", 1) == first
    assert copied == [0, 2, 3]


def test_files_of_another_date_are_copied_and_a_trial_is_no_night(tmp_path: Path, copied: list[int]) -> None:
    first, trial, second = (
        StateFolder(tmp_path / "res" / name, root=tmp_path / "res") for name in ("01", "trial", "02")
    )
    publish_night(tmp_path, BASE, first.results, 0, first)
    few = replace(BASE, rows=BASE.rows[:5], trial=True)
    publish_night(tmp_path, few, trial.results, 1, trial)
    assert copied == [0], "the first file of the trial is one of the night's"
    now = replace(BASE, rows=(*BASE.rows, (20, "x")))
    found = publish_night(tmp_path, now, second.results, 2, second)
    assert copied == [0, 0, 1, 2]
    assert found == publish_night(tmp_path, now, tmp_path / "fresh/res", 3)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 2, "files": {}}', '{"format": 1, "files": {"a": [1, "b"]}}']
)
def test_an_unusable_note_is_ignored(tmp_path: Path, copied: list[int], text: str) -> None:
    first = publish_night(tmp_path, BASE, tmp_path / "res", 0)
    note = StateFolder(tmp_path / "res").result_files
    before = note.read_text()
    note.write_text(text)
    assert publish_night(tmp_path, BASE, tmp_path / "res", 1) == first
    assert (copied, note.read_text()) == ([], before)


def test_a_note_with_wrong_rows_is_ignored(tmp_path: Path, copied: list[int]) -> None:
    """As if the note belonged to another result."""
    first = publish_night(tmp_path, BASE, tmp_path / "res", 0)
    note = StateFolder(tmp_path / "res").result_files
    note.write_text(note.read_text().replace("   4,\n", "   3,\n"))
    assert publish_night(tmp_path, BASE, tmp_path / "res", 1) == first
    assert copied == [3]
