"""Implements `batchinfer verify`: checks every checksum of a result and of its stored answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchinfer.filesystem.location import Location
from batchinfer.store.results.find_state import find_state
from batchinfer.store.results.published import Problem
from batchinfer.store.results.verify import verify_result, verify_store


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of checking a result folder and its stored answers.

    Attributes:
        problems: The damaged files.
        store: The folder of the stored answers that were checked, or None.
        unchecked: Why stored answers were not checked, or None.
    """

    problems: list[Problem]
    store: Path | None
    unchecked: str | None = None


def verify_results(results: Path) -> Verification:
    """Read a published result and the stored answers of its job completely, and check every checksum.

    Args:
        results: The result folder.
    """
    state, problems = find_state(results), verify_result(Location.at(results))
    if state.completions.is_dir():
        return Verification([*problems, *verify_store(state.completions)], state.completions)
    why = f"the stored answers were not checked: there is no folder {state.completions}"
    if state.shares_store:
        return Verification(problems, None, f"{why}, where the job's last run stored them")
    return Verification(problems, None, f"{why}; a store at cache.path is found once the job has run again")
