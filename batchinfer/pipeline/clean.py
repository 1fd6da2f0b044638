"""Removes unused answers and old folders of a job, after a run and for `batchinfer clean`."""

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
from batchinfer.store.answers.cleaning import CHEAP, CleaningResult, RetentionRule, clean_store
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.answers.uses import UsingResult, record_use, stored_keep, write_uses
from batchinfer.store.kept.files import last_kept
from batchinfer.store.results.find_state import find_state
from batchinfer.store.results.join import Join

_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Cleanup:
    """The answers and folders that a cleanup removed, or would remove if `dry_run` is True.

    Attributes:
        store: Folder of the stored answers.
        keep_days: Days for which unused answers are kept. None: forever.
        dry_run: True if nothing was removed. The counts then say how much a real cleanup would remove.
        answers: Counts of dropped and kept answers.
        folders: Number of removed folders: replaced results, unused parts of the state folder, and expired copies of
            rows.
        folder_bytes: Size of these folders.
    """

    store: Path
    keep_days: int | None
    dry_run: bool
    answers: CleaningResult
    folders: int
    folder_bytes: int

    @property
    def bytes_freed(self) -> int:
        """Return the number of bytes that the cleanup freed in the store and in folders, or would free."""
        return self.answers.bytes_freed + self.folder_bytes

    def to_json(self) -> dict[str, Any]:
        """Return the cleanup as the JSON object that `batchinfer clean --json` prints."""
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
        """Return the cleanup as two lines for a terminal."""
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
    """Record which stored answers a result uses, so that later cleanups keep them.

    Call it before the result is published.

    Args:
        state: The job's state folder.
        keep: Days for which answers are kept after their last use. None: forever.
        join: The join of the job's rows with their stored answers.
        store: The store of answers.

    Raises:
        StorageError: The record cannot be written.
    """
    user = UsingResult(str(state.root), str(state.published), keep)
    now = time.time()  # not the start of the run, because a run may last longer than `keep`
    write_uses(store.path, record_use(user, join.used(), store.rows_by_part(), now), state.ops)


def clean_after_run(
    state: StateFolder, keep: int | None, should_continue: Callable[[], bool], notice: Callable[[str], None]
) -> None:
    """Drop stored answers that no result uses, if this takes little time and no other run uses the store.

    A storage error does not fail the run, because its result is published already.

    Args:
        state: The job's state folder.
        keep: Days for which unused answers are kept. None: forever.
        should_continue: Returns False to stop the cleanup early.
        notice: Called with the text of a storage error.
    """
    try:
        clean_store(
            state.completions,
            RetentionRule(keep, str(state.root)),
            CHEAP,
            should_continue=should_continue,
            ops=state.ops,
        )
    except Locked:
        return  # the run that holds the store will clean it
    except StorageError as error:
        notice(f"the results are published, but stored answers that no result uses were not removed: {error}")


def clean_job(job: Job, dry_run: bool) -> Cleanup:
    """Remove unused answers, replaced results and other old folders of a job.

    Args:
        job: The job. Its `cache.keep` is the number of days for which unused answers are kept.
        dry_run: True to remove nothing, and only count the answers and folders.

    Raises:
        Locked: The job is running.
        StorageError: A file cannot be removed.
    """
    return _clean(state_of(job), job.cache.keep, dry_run)


def clean_result(results: Path, dry_run: bool) -> Cleanup:
    """Remove unused answers, replaced results and other old folders of the job that published a result.

    Args:
        results: The folder of the result. `cache.keep` of the job's last run is the number of days for which unused
            answers are kept.
        dry_run: True to remove nothing, and only count the answers and folders.

    Raises:
        InputMissing: There is no state folder next to the result.
        Locked: The job is running.
        StorageError: A file cannot be removed.
    """
    state = find_state(results)
    if not state.job.is_dir():
        raise InputMissing(
            f"{results}: there is no state of a job next to this folder; name the job file instead"
        )
    return _clean(state, stored_keep(state.completions, str(state.root)), dry_run)


def _clean(state: StateFolder, keep: int | None, dry_run: bool) -> Cleanup:
    # of the root, because `idle_parts` skips the part of the state that it is called on
    root = StateFolder(state.root)
    kept = _expired_kept(state, keep)
    old = [*root.old_generations(), *root.idle_parts(), *kept]
    folder_bytes = sum(_bytes_in(old))
    if not dry_run:
        if kept:  # otherwise there may be no state folder to lock
            _remove_kept(state, kept)
        if root.old_generations():
            with root.lock():
                root.remove_old_generations()
        root.remove_idle()
    answers = clean_store(
        state.completions, RetentionRule(keep, str(state.root)), dry_run=dry_run, ops=state.ops
    )
    return Cleanup(state.completions, keep, dry_run, answers, len(old), folder_bytes)


def _remove_kept(state: StateFolder, kept: Iterable[Path]) -> None:
    with state.lock_shared():
        for folder in () if state.parts_in_use() else kept:
            with storage(folder, "remove"):
                state.ops.remove_tree(folder)


def _expired_kept(state: StateFolder, keep: int | None) -> list[Path]:
    last = last_kept(state.kept)
    if last is None or keep is None or last > time.time() - keep * _DAY_S:
        return []
    return [state.kept]


def _bytes_in(folders: Iterable[Path]) -> Iterable[int]:
    return (path.lstat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
