"""Implements `batchinfer diff`: compares two results of the same rows."""

from __future__ import annotations

from pathlib import Path

from batchinfer.core.errors import InputMissing
from batchinfer.filesystem.location import Location
from batchinfer.store.results.diff import DiffOptions, ResultDiff, diff_results
from batchinfer.store.results.published import open_published
from batchinfer.verbs.query import no_result


def compare_results(a: Path, b: Path, options: DiffOptions) -> ResultDiff:
    """Return the differences between two results of the same rows.

    Args:
        a: A result folder.
        b: The result folder to compare with `a`.
        options: The column to match rows by, and the number of example rows to return.

    Raises:
        InputMissing: A folder has no result.
        UsageError: The rows cannot be matched.
        StorageError: A file is damaged.
        OutOfMemory: The comparison needs too much memory.
    """
    return diff_results(_files(a), _files(b), options)


def _files(results: Path) -> tuple[Path, ...]:
    found = open_published(Location.at(results))
    if found is None:
        raise InputMissing(no_result(results))
    return found.files
