"""Reads from earlier runs of a job what a forecast needs: the lengths of answers and the times of steps."""

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

NEWEST = 3  # runs that are looked at: an older one may have had other rows, other templates or other code
MOST_REQUESTS = 500_000  # read of each run
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
LAUNCHED_STEPS = "launched_steps"  # since format 13; before it was always 1


@dataclass(frozen=True, slots=True)
class EarlierLengths:
    """Prompts and answers of requests that finished in `runs` earlier runs, in tokens. `cut`: whether an answer had no
    room to become longer."""

    runs: int
    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]
    cut: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EarlierSteps:
    """Steps of `runs` earlier runs on the same machine in the same arithmetic; columns of the table `steps`."""

    runs: int
    columns: dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class EarlierIdle:
    """Idle times of the devices in `runs` earlier runs that computed something; columns of the run table."""

    runs: int
    columns: dict[str, NDArray[Any]]

    def median(self, name: str) -> float:
        """Return the median of a column."""
        return float(np.median(self.columns[name]))

    def per_row(self, name: str) -> float:
        """Return the median of a column, for one row of the job."""
        return float(np.median(self.columns[name] / np.maximum(self.columns["rows"], 1)))


IDLE_COLUMNS = ("idle_load_s", "idle_tail_s", "idle_publish_s", "rows")


def earlier_idle(folder: Path) -> EarlierIdle | None:
    """Read the idle times of the newest runs that know them, trials included; None: there is no such run."""
    known = (run for run in _newest(folder, RUN, IDLE_COLUMNS) if run["idle_load_s"][0] >= 0)  # NaN: null
    found = list(islice(known, NEWEST))
    return EarlierIdle(len(found), _joined(found)) if found else None


def earlier_overhead(folder: Path) -> tuple[float, int] | None:
    """Return the median seconds of the newest runs besides their engines, and how many runs; None: there is none."""
    runs = _newest(folder, RUN, ("wall_s", "engine_s", "idle_load_s"))
    known = (run for run in runs if run["idle_load_s"][0] >= 0 and run["engine_s"][0] >= 0)  # NaN: null
    found = list(islice(known, NEWEST))
    if not found:
        return None
    joined = _joined(found)
    return float(np.median(np.maximum(0.0, joined["wall_s"] - joined["engine_s"]))), len(found)


def earlier_lengths(folder: Path) -> EarlierLengths | None:
    """Read the lengths of the newest runs that finished a request, but of no unreadable file; None: no such run."""
    found = list(islice(_newest(folder, REQUESTS, ("prompt_tokens", "completion_tokens", "cut")), NEWEST))
    return EarlierLengths(len(found), *_joined(found).values()) if found else None


def earlier_steps(folder: Path, alike: dict[str, Any]) -> EarlierSteps | None:
    """Read the steps of the newest runs whose run table says the same of hardware and arithmetic as `alike`."""
    found = list(islice(_newest(folder, STEPS, STEP_COLUMNS, alike, {LAUNCHED_STEPS: 1}), NEWEST))
    return EarlierSteps(len(found), _joined(found)) if found else None


@dataclass(frozen=True, slots=True)
class EarlierProposals:
    """Proposals that a run verified, how many of them were right, and about how many seconds they saved.

    Negative seconds: they took longer. None: not known.
    """

    drafted: int
    accepted: int
    saved_s: float | None


def earlier_proposals(folder: Path) -> EarlierProposals | None:
    """Read what drafts came to in the newest run that left a table; None: there is no such run, or it had none."""
    for run in islice(_newest(folder, RUN, ("drafted_tokens", "accepted_tokens", "drafts_saved_s")), 1):
        drafted, accepted, saved_s = (float(values[0]) for values in run.values())
        if drafted > 0:  # NaN is Arrow's null
            known = None if math.isnan(saved_s) else saved_s
            return EarlierProposals(int(drafted), int(accepted), known)
    return None


@dataclass(frozen=True, slots=True)
class EarlierExperts:
    """Tokens that the experts of each layer were given in `runs` earlier runs, (experts,) int64 by layer; and how many
    tokens each of their steps ran."""

    runs: int
    tokens: Mapping[int, NDArray[np.int64]]
    steps: NDArray[np.int64]


def earlier_experts(folder: Path, model: str) -> EarlierExperts | None:
    """Read what experts were given in the newest runs of a model that gave them something; None: there is none."""
    alike = {"model": model}
    found = list(islice(_newest(folder, EXPERTS, ("layer", "expert", "tokens"), alike), NEWEST))
    if not any(run["tokens"].any() for run in found):
        return None
    steps = [*islice(_newest(folder, STEPS, ("prefill_tokens", "decode_tokens"), alike), NEWEST)]
    sizes = [run["prefill_tokens"] + run["decode_tokens"] for run in steps]
    return EarlierExperts(len(found), _summed(_joined(found)), np.concatenate([[], *sizes]).astype(np.int64))


def _summed(rows: Mapping[str, NDArray[Any]]) -> dict[int, NDArray[np.int64]]:
    """Return the tokens of each expert by layer, over all runs."""
    found = dict[int, NDArray[np.int64]]()
    for layer in np.unique(rows["layer"]):
        own = rows["layer"] == layer
        found[int(layer)] = np.bincount(rows["expert"][own], rows["tokens"][own]).astype(np.int64)
    return found


def earlier_power(folder: Path, alike: dict[str, Any]) -> float | None:
    """Watts that the machine took while the engine ran, over the newest runs that are alike and know their energy.

    None: there are none.
    """
    runs = _newest(folder, RUN, ("energy_j", "engine_wall_s"), alike)
    known = (
        run for run in runs if run["energy_j"][0] > 0 and run["engine_wall_s"][0] > 0
    )  # NaN is Arrow's null
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
    """Read columns of the runs that left rows in a table, newest first; with `alike`, of those that it describes.
    `newer`: columns that older tables lack, and what they would have."""
    for path in reversed(tables(folder, table)):
        if alike is not None:
            told = _columns(path.with_name(path.name.replace(table, RUN, 1)), tuple(alike), 1)
            if told is None or not _says(told, alike):
                continue
        read = _columns(path, names, MOST_REQUESTS, newer)
        if read is not None and len(read[names[0]]):
            yield read


def _says(told: Mapping[str, Any], alike: Mapping[str, Any]) -> bool:
    """Whether a run's columns have these values. None is null, of which Arrow makes NaN for NumPy."""
    found = {name: told[name][0] for name in alike}
    return {name: None if value != value else value for name, value in found.items()} == dict(alike)


def _columns(
    path: Path, names: Sequence[str], most: int, newer: Mapping[str, int] = MappingProxyType({})
) -> dict[str, NDArray[Any]] | None:
    """Read columns of a table, and those that only a `newer` one has.

    None for a file that is gone, damaged or older than one of the columns: a forecast can do without it.
    """
    try:
        with pq.ParquetFile(path) as file:
            batch = next(file.iter_batches(batch_size=most, columns=[*names, *newer]), None)
    except (OSError, ValueError):  # pyarrow's errors are among these
        return None
    if batch is None or not set(names) <= set(batch.schema.names):
        return None
    filled = {name: np.full(len(batch), value) for name, value in newer.items()}
    there = {name: batch.column(name).to_numpy(zero_copy_only=False) for name in batch.schema.names}
    return filled | there


def _joined(parts: Sequence[dict[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
