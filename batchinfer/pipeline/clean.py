"""Cleaning removes what a job's state no longer needs: after a run, and by `batchinfer clean`, which says what it
freed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchinfer.core.errors import InputMissing, Locked, StorageError
from batchinfer.core.wording import count, counted, size
from batchinfer.filesystem.durable import storage
from batchinfer.filesystem.state import StateFolder, state_of
from batchinfer.job import Job
from batchinfer.store.answers.cleaning import CHEAP, Cleaned, Keep, clean_store
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.answers.uses import User, record_use, stored_keep, write_uses
from batchinfer.store.kept.files import last_kept
from batchinfer.store.results.find_state import find_state
from batchinfer.store.results.join import Join

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Cleanup:
    """A cleanup says what was removed, or with `dry_run` would be."""

    store: Path
    keep_days: int | None
    dry_run: bool
    answers: Cleaned
    folders: int  # replaced results, and what is left of results whose last run is a day ago
    folder_bytes: int

    @property
    def bytes_freed(self) -> int:
        return self.answers.bytes_freed + self.folder_bytes

    def to_json(self) -> dict[str, Any]:
        answers = asdict(self.answers) | {"bytes_freed": self.bytes_freed}
        return {
            "exit_code": 0,
            "dry_run": self.dry_run,
            "store": str(self.store),
            "keep_days": self.keep_days,
            "folders_removed": self.folders,
            **answers,
        }

    def text(self) -> str:
        """Two lines for people."""
        days = "forever" if self.keep_days is None else f"for {self.keep_days} days"
        would = "would be " if self.dry_run else ""
        about = "about " if self.dry_run else ""
        answers = self.answers
        return (
            f"{self.store}: {counted(answers.rows_dropped, 'answer')} {would}dropped, {count(answers.rows_kept)} kept, "
            f"in {counted(answers.parts_after, 'part')} instead of {count(answers.parts_before)} "
            f"(unused answers are kept {days})\n"
            f"{counted(self.folders, 'old folder')} {would}removed;  {about}{size(self.bytes_freed)} {would}freed"
        )


def note_use(state: StateFolder, keep: int | None, join: Join, store: CompletionStore) -> None:
    """Note which stored answers a result is about to be made of: then none of them is taken for unused.

    Raises StorageError."""
    user = User(str(state.root), str(state.published), keep)
    now = time.time()  # not the run's start: a run may take longer than answers are kept
    write_uses(store.path, record_use(user, join.used(), store.rows_by_part(), now), state.ops)


def clean_after_run(
    state: StateFolder, keep: int | None, should_continue: Callable[[], bool], notice: Callable[[str], None]
) -> None:
    """Drop what no result used lately, if that is worth the copying and nobody else uses the store.

    The results are published: a disk that fails now is told to `notice`, and fails no run.
    """
    try:
        clean_store(
            state.completions,
            Keep(keep, str(state.root)),
            CHEAP,
            should_continue=should_continue,
            ops=state.ops,
        )
    except Locked:
        return  # whoever uses it cleans it
    except StorageError as error:
        notice(f"the results are published, but stored answers that no result uses were not removed: {error}")


def clean_job(job: Job, dry_run: bool) -> Cleanup:
    """Clean what belongs to a job. Raises Locked while it runs, StorageError."""
    return _clean(state_of(job), job.cache.keep, dry_run)


def clean_result(results: Path, dry_run: bool) -> Cleanup:
    """Clean what belongs to the job of this result, with the `keep` of its last run.

    Raises InputMissing where no job has left its state, Locked, StorageError.
    """
    state = find_state(results)
    if not state.job.is_dir():
        raise InputMissing(
            f"{results}: there is no state of a job next to this folder; name the job file instead"
        )
    return _clean(state, stored_keep(state.completions, str(state.root)), dry_run)


def _clean(state: StateFolder, keep: int | None, dry_run: bool) -> Cleanup:
    # no result's part of the state is spared for being the one that was named
    whole = StateFolder(state.root)
    kept = _expired_kept(state, keep)
    old = [*whole.old_generations(), *whole.idle_parts(), *kept]
    folder_bytes = sum(_bytes_in(old))
    if not dry_run:
        if kept:  # else there may be no state, and so no lock to take
            _remove_kept(state, kept)
        if whole.old_generations():
            with whole.lock():
                whole.remove_old_generations()
        whole.remove_idle()
    answers = clean_store(state.completions, Keep(keep, str(state.root)), dry_run=dry_run, ops=state.ops)
    return Cleanup(state.completions, keep, dry_run, answers, len(old), folder_bytes)


def _remove_kept(state: StateFolder, kept: Iterable[Path]) -> None:
    """Remove these folders, unless a run is at work, which may be about to replace what is in them."""
    with state.lock_shared():
        for folder in () if state.parts_in_use() else kept:
            with storage(folder, "remove"):
                state.ops.remove_tree(folder)


def _expired_kept(state: StateFolder, keep: int | None) -> list[Path]:
    """Return the folder of what the job's last run kept of its rows, if that is as old as unused answers may be."""
    last = last_kept(state.kept)
    if last is None or keep is None or last > time.time() - keep * _DAY_S:
        return []
    return [state.kept]


def _bytes_in(folders: Iterable[Path]) -> Iterable[int]:
    return (path.lstat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
