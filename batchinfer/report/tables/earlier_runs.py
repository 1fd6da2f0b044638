"""Reads the figures of earlier runs that a forecast uses, such as the lengths of answers and the times of steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.report.tables.columns.declared import EXPERTS, REQUESTS, RUN, STEPS
from batchinfer.report.tables.folder import tables

NEWEST = 3  # number of runs used; older ones may have had other rows, templates or code
MOST_REQUESTS = 500_000  # limit of rows read per table and run
STEP_COLUMNS = (
    "prefill_tokens",
    "decode_tokens",
    "recomputed_tokens",
    "sampled_tokens",
    "running",
    "flops",
    "bytes",
    "model_s",
    "duration_s",
    "interval_s",
)
LAUNCHED_STEPS = "launched_steps"  # since format 13; always 1 before


@dataclass(frozen=True, slots=True)
class EarlierLengths:
    """The lengths of finished requests of earlier runs in tokens. Shape of each array: [requests].

    Attributes:
        runs: Number of runs.
        prompts: Lengths of prompts.
        answers: Lengths of answers.
        cut: True if the answer ended at its limit.
    """

    runs: int
    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]
    cut: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EarlierSteps:
    """The steps of earlier runs on the same machine with the same numerics.

    Attributes:
        runs: Number of runs.
        columns: Columns of the table `steps` by name. Shape of each array: [steps].
    """

    runs: int
    columns: dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class EarlierIdle:
    """The idle times of devices in earlier runs that computed something.

    Attributes:
        runs: Number of runs.
        columns: Columns of the run table by name. Shape of each array: [runs].
    """

    runs: int
    columns: dict[str, NDArray[Any]]

    def median(self, name: str) -> float:
        """Return the median over earlier runs of a column of the run table."""
        return float(np.median(self.columns[name]))

    def per_row(self, name: str) -> float:
        """Return the median over earlier runs of a column of the run table divided by the rows of the job."""
        return float(np.median(self.columns[name] / np.maximum(self.columns["rows"], 1)))


IDLE_COLUMNS = ("idle_load_s", "idle_tail_s", "idle_publish_s", "rows")


def earlier_idle(folder: Path) -> EarlierIdle | None:
    """Read the idle times of the newest runs that have them, trials included. Return None if there are none.

    Args:
        folder: The folder of report tables.
    """
    known = (run for run in _newest(folder, RUN, IDLE_COLUMNS) if run["idle_load_s"][0] >= 0)  # NaN: null
    found = list(islice(known, NEWEST))
    return EarlierIdle(len(found), _joined(found)) if found else None


def earlier_overhead(folder: Path) -> tuple[float, int] | None:
    """Return the median seconds outside of the engine in the newest runs, and the number of runs, or None.

    Args:
        folder: The folder of report tables.
    """
    runs = _newest(folder, RUN, ("wall_s", "engine_s", "idle_load_s"))
    known = (run for run in runs if run["idle_load_s"][0] >= 0 and run["engine_s"][0] >= 0)  # NaN: null
    found = list(islice(known, NEWEST))
    if not found:
        return None
    joined = _joined(found)
    return float(np.median(np.maximum(0.0, joined["wall_s"] - joined["engine_s"]))), len(found)


def earlier_lengths(folder: Path) -> EarlierLengths | None:
    """Read the lengths of requests of the newest runs that finished any. Return None if there are none.

    Args:
        folder: The folder of report tables.
    """
    found = list(islice(_newest(folder, REQUESTS, ("prompt_tokens", "completion_tokens", "cut")), NEWEST))
    return EarlierLengths(len(found), *_joined(found).values()) if found else None


def earlier_steps(folder: Path, alike: dict[str, Any]) -> EarlierSteps | None:
    """Read the steps of the newest runs that are similar. Return None if there are none.

    Args:
        folder: The folder of report tables.
        alike: Columns of the run table that must have these values.
    """
    found = list(islice(_newest(folder, STEPS, STEP_COLUMNS, alike, {LAUNCHED_STEPS: 1}), NEWEST))
    return EarlierSteps(len(found), _joined(found)) if found else None


@dataclass(frozen=True, slots=True)
class EarlierProposals:
    """The draft tokens of the newest run.

    Attributes:
        drafted: Draft tokens that steps verified.
        accepted: Accepted draft tokens.
        saved_s: Estimated seconds saved, negative if drafts took longer, or None if unknown.
    """

    drafted: int
    accepted: int
    saved_s: float | None


def earlier_proposals(folder: Path) -> EarlierProposals | None:
    """Read the draft tokens of the newest run. Return None if there is no run, or if it had none.

    Args:
        folder: The folder of report tables.
    """
    for run in islice(_newest(folder, RUN, ("drafted_tokens", "accepted_tokens", "drafts_saved_s")), 1):
        drafted, accepted, saved_s = (float(values[0]) for values in run.values())
        if drafted > 0:  # NaN is Arrow's null
            known = None if math.isnan(saved_s) else saved_s
            return EarlierProposals(int(drafted), int(accepted), known)
    return None


@dataclass(frozen=True, slots=True)
class EarlierExperts:
    """The load of experts in earlier runs.

    Attributes:
        runs: Number of runs.
        tokens: Tokens per expert by layer. Shape of each array: [experts].
        steps: Tokens of each step, with shape [steps].
    """

    runs: int
    tokens: Mapping[int, NDArray[np.int64]]
    steps: NDArray[np.int64]


def earlier_experts(folder: Path, model: str) -> EarlierExperts | None:
    """Read the load of experts in the newest runs of a model. Return None if no expert received a token.

    Args:
        folder: The folder of report tables.
        model: The value of the column `model` of the run table.
    """
    alike = {"model": model}
    found = list(islice(_newest(folder, EXPERTS, ("layer", "expert", "tokens"), alike), NEWEST))
    if not any(run["tokens"].any() for run in found):
        return None
    steps = [*islice(_newest(folder, STEPS, ("prefill_tokens", "decode_tokens"), alike), NEWEST)]
    sizes = [run["prefill_tokens"] + run["decode_tokens"] for run in steps]
    return EarlierExperts(len(found), _summed(_joined(found)), np.concatenate([[], *sizes]).astype(np.int64))


def _summed(rows: Mapping[str, NDArray[Any]]) -> dict[int, NDArray[np.int64]]:
    """Return the tokens of each expert by layer, summed over the rows of the table `experts`."""
    found = dict[int, NDArray[np.int64]]()
    for layer in np.unique(rows["layer"]):
        own = rows["layer"] == layer
        found[int(layer)] = np.bincount(rows["expert"][own], rows["tokens"][own]).astype(np.int64)
    return found


def earlier_power(folder: Path, alike: dict[str, Any]) -> float | None:
    """Return the mean power in watts while engines ran, or None if no similar run has measured energy.

    Args:
        folder: The folder of report tables.
        alike: Columns of the run table that must have these values.
    """
    runs = _newest(folder, RUN, ("energy_j", "engine_wall_s"), alike)
    # NaN is Arrow's null
    known = (run for run in runs if run["energy_j"][0] > 0 and run["engine_wall_s"][0] > 0)
    found = list(islice(known, NEWEST))
    if not found:
        return None
    joined = _joined(found)
    return float(joined["energy_j"].sum() / joined["engine_wall_s"].sum())


def _newest(
    folder: Path,
    table: str,
    names: Sequence[str],
    alike: Mapping[str, Any] | None = None,
    newer: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield columns of a report table of each run that has rows, newest run first.

    Skips files that cannot be read.

    Args:
        folder: The folder of report tables.
        table: The table.
        names: The columns.
        alike: Columns of the run table that must have these values.
        newer: Columns that older tables do not have, with the value to use for these.
    """
    for path in reversed(tables(folder, table)):
        if alike is not None:
            run = _columns(path.with_name(path.name.replace(table, RUN, 1)), tuple(alike), 1)
            if run is None or not _has_values(run, alike):
                continue
        read = _columns(path, names, MOST_REQUESTS, newer)
        if read is not None and len(read[names[0]]):
            yield read


def _has_values(run: Mapping[str, Any], alike: Mapping[str, Any]) -> bool:
    """Return True if the first row of the columns `run` has the values `alike`.

    Null is None in `alike`, and NaN in the columns.
    """
    found = {name: run[name][0] for name in alike}
    return {name: None if value != value else value for name, value in found.items()} == dict(alike)


def _columns(
    path: Path, names: Sequence[str], most: int, newer: Mapping[str, int] = MappingProxyType({})
) -> dict[str, NDArray[Any]] | None:
    """Read columns of a report table.

    Return None if the file is gone, damaged, or lacks one of the columns `names`.

    Args:
        path: The file of the table.
        names: The columns.
        most: The largest number of rows to read.
        newer: Columns that an older file may not have, with the value to use instead.
    """
    try:
        with pq.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=most, columns=[*names, *newer]), None)
    except (OSError, ValueError):  # pyarrow's errors are among these
        return None
    if batch is None or not set(names) <= set(batch.schema.names):
        return None
    filled = {name: np.full(len(batch), value) for name, value in newer.items()}
    found = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in batch.schema.names}
    return filled | found


def _joined(parts: Sequence[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
