"""Reads the measurements of earlier runs that a forecast uses, such as lengths of answers and times of steps."""

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
        truncated: True if the answer ended at its limit.
    """

    runs: int
    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]
    truncated: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EarlierSteps:
    """The steps of earlier runs that are similar to this run.

    Attributes:
        runs: Number of runs.
        columns: Columns of the report table `steps` by name. Shape of each array: [steps].
    """

    runs: int
    columns: dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class EarlierIdle:
    """The times in which devices were idle in earlier runs.

    Attributes:
        runs: Number of runs.
        columns: Columns of the run table by name. Shape of each array: [runs].
    """

    runs: int
    columns: dict[str, NDArray[Any]]

    def median(self, name: str) -> float:
        """Return the median, over the earlier runs, of the column `name` of the run table."""
        return float(np.median(self.columns[name]))

    def per_row(self, name: str) -> float:
        """Return the median, over the earlier runs, of the column `name` divided by the column `rows`."""
        return float(np.median(self.columns[name] / np.maximum(self.columns["rows"], 1)))


IDLE_COLUMNS = ("idle_load_s", "idle_tail_s", "idle_publish_s", "rows")


def earlier_idle(folder: Path) -> EarlierIdle | None:
    """Return the idle times of devices in the newest runs that recorded them, or None if there are none.

    Trials count as well.

    Args:
        folder: The folder of report tables.
    """
    known = (run for run in _newest(folder, RUN, IDLE_COLUMNS) if run["idle_load_s"][0] >= 0)  # NaN: null
    found = list(islice(known, NEWEST))
    return EarlierIdle(len(found), _joined(found)) if found else None


def earlier_overhead(folder: Path) -> tuple[float, int] | None:
    """Return the median of the seconds that the newest runs spent outside of the engine.

    The second value is the number of these runs. Return None if there are none.

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
    """Return the lengths of requests in the newest runs that finished any, or None if there are none.

    Args:
        folder: The folder of report tables.
    """
    found = list(islice(_newest(folder, REQUESTS, ("prompt_tokens", "completion_tokens", "cut")), NEWEST))
    return EarlierLengths(len(found), *_joined(found).values()) if found else None


def earlier_steps(folder: Path, alike: dict[str, Any]) -> EarlierSteps | None:
    """Return the steps of the newest similar runs, or None if there are none.

    Args:
        folder: The folder of report tables.
        alike: The values of columns of the run table that a similar run must have.
    """
    found = list(islice(_newest(folder, STEPS, STEP_COLUMNS, alike, {LAUNCHED_STEPS: 1}), NEWEST))
    return EarlierSteps(len(found), _joined(found)) if found else None


@dataclass(frozen=True, slots=True)
class EarlierProposals:
    """The numbers of draft tokens in the newest run, and the time that they saved.

    Attributes:
        drafted: Draft tokens that steps verified.
        accepted: Accepted draft tokens.
        saved_s: Estimated seconds saved, negative if drafts took longer, or None if unknown.
    """

    drafted: int
    accepted: int
    saved_s: float | None


def earlier_proposals(folder: Path) -> EarlierProposals | None:
    """Return the numbers of draft tokens in the newest run. None: there is no run, or it had no draft tokens.

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
    """How many tokens the experts of a model received in earlier runs.

    Attributes:
        runs: Number of runs.
        tokens: Tokens per expert by layer. Shape of each array: [experts].
        steps: Number of tokens in each step, with shape [steps].
    """

    runs: int
    tokens: Mapping[int, NDArray[np.int64]]
    steps: NDArray[np.int64]


def earlier_experts(folder: Path, model: str) -> EarlierExperts | None:
    """Return the load of experts in the newest runs of a model, or None if no expert received a token.

    Args:
        folder: The folder of report tables.
        model: The model, as in the column `model` of the run table.
    """
    alike = {"model": model}
    found = list(islice(_newest(folder, EXPERTS, ("layer", "expert", "tokens"), alike), NEWEST))
    if not any(run["tokens"].any() for run in found):
        return None
    steps = [*islice(_newest(folder, STEPS, ("prefill_tokens", "decode_tokens"), alike), NEWEST)]
    sizes = [run["prefill_tokens"] + run["decode_tokens"] for run in steps]
    return EarlierExperts(len(found), _summed(_joined(found)), np.concatenate([[], *sizes]).astype(np.int64))


def _summed(rows: Mapping[str, NDArray[Any]]) -> dict[int, NDArray[np.int64]]:
    found = dict[int, NDArray[np.int64]]()
    for layer in np.unique(rows["layer"]):
        own = rows["layer"] == layer
        found[int(layer)] = np.bincount(rows["expert"][own], rows["tokens"][own]).astype(np.int64)
    return found


def earlier_power(folder: Path, alike: dict[str, Any]) -> float | None:
    """Return the mean power in watts while engines ran, over the newest similar runs.

    Return None if no similar run has measured energy.

    Args:
        folder: The folder of report tables.
        alike: The values of columns of the run table that a similar run must have.
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
    # Files that cannot be read are skipped. `newer` has the columns that older tables do not have, with the
    # value for these
    for path in reversed(tables(folder, table)):
        if alike is not None:
            run = _columns(path.with_name(path.name.replace(table, RUN, 1)), tuple(alike), 1)
            if run is None or not _has_values(run, alike):
                continue
        read = _columns(path, names, MOST_REQUESTS, newer)
        if read is not None and len(read[names[0]]):
            yield read


def _has_values(run: Mapping[str, Any], alike: Mapping[str, Any]) -> bool:
    # Null is None in `alike`, and NaN in the columns
    found = {name: run[name][0] for name in alike}
    return {name: None if value != value else value for name, value in found.items()} == dict(alike)


def _columns(
    path: Path, names: Sequence[str], most: int, newer: Mapping[str, int] = MappingProxyType({})
) -> dict[str, NDArray[Any]] | None:
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
