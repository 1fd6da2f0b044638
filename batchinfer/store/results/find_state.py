"""Finds the state folder of a result, without the job file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from batchinfer.core.errors import DamagedResult
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.state import STATE_PREFIX, StateFolder
from batchinfer.job.results_root import folder_name, results_root, root_of_trial
from batchinfer.job.variables import HOLE
from batchinfer.store.results.manifest import read_manifest

_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def find_state(results: Path) -> StateFolder:
    """Find the state folder of a result folder without a job file. Its store is the store of the last run.

    If several state folders are possible, one with a subfolder for this result is preferred. If none exists,
    the returned one is next to the result.
    """
    results = results.absolute()
    places = [StateFolder(results, root=root) for root in _roots(results)]
    mine = (state for state in places if state.path.is_dir())
    jobs = (state for state in places if state.job.is_dir())
    return (next(mine, None) or next(jobs, None) or StateFolder(results)).of_last_run()


def _roots(results: Path) -> Iterator[Path]:
    # The most likely root comes first
    yield results
    if (root := root_of_trial(results)) is not None:
        yield root
    for date in dict.fromkeys(_DATE.findall(str(results))):
        yield results_root(str(results).replace(date, HOLE), results.parent, "")
    if results.parent.is_dir():  # if output.path consists of a date only, the root is the job's name
        for state in sorted(results.parent.glob(f"{STATE_PREFIX}*/results")):
            root = results.with_name(state.parent.name.removeprefix(STATE_PREFIX))
            if StateFolder(results, root=root).path.is_dir():
                yield root
    if (job := _job_of(results)) is not None:
        yield results.with_name(folder_name(job))


def _job_of(results: Path) -> str | None:
    try:
        manifest = read_manifest(Location.at(results))
    except DamagedResult:  # reported when the result is read; its state may still be found by name
        return None
    return None if manifest is None else manifest.job
