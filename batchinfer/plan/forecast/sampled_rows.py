"""A sample of a job's rows, from everywhere in its input: how it is drawn, and how far its figures may be off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.input.job_input import input_files, open_input
from batchinfer.input.reader import Strata
from batchinfer.job import Job
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.prefixes import PlannedPrefix

# Rows that stand together in the input often share a document or a length: runs of them show both.
RUN_ROWS = 16
WIDTH = 1.96  # standard errors on either side of an estimate that hold the truth 19 times of 20


@dataclass(frozen=True, slots=True)
class SampledRows:
    """How many rows were read of how many, and what that means for the estimates."""

    rows: int
    of_rows: int
    error: float | None = None  # of the tokens, 95 times of 100 at most; None: too few rows to tell

    @property
    def times(self) -> float:
        """The factor from the sample's counts to those of all rows."""
        return self.of_rows / self.rows

    def whole_plan(self, plan: Plan) -> Plan:
        """The counts of a plan of the sample, scaled to all rows. There may be more duplicates and shared tokens: a row
        whose twin is outside the sample looks unique."""
        counts = ("error_rows", "distinct", "duplicates", "present", "to_run")
        tokens = ("prompt_tokens", "expected_tokens", "shared_prefix_tokens")
        scaled = {name: round(getattr(plan, name) * self.times) for name in (*counts, *tokens)}
        return replace(plan, rows=self.of_rows, **scaled)

    def whole_prefix(self, node: PlannedPrefix) -> PlannedPrefix:
        """Return the node with as many users as all rows make likely."""
        users = round(node.users * self.times)
        return replace(node, users=users, saved_tokens=node.own_tokens * (users - 1))


def strata_of(job: Job, rows: int) -> tuple[Strata, int] | None:
    """Return how to draw about `rows` rows of a job's files, and how many there are; None where these are no more. The
    whole input is read for it."""
    found = open_input(job, input_files(job)).count(job.input.limit)
    if found <= rows:
        return None
    run = min(RUN_ROWS, rows)
    return Strata(math.ceil(run * found / rows), run), found


def sampled_rows(index_parts: Sequence[Path], of_rows: int) -> SampledRows:
    """Return how good a sample is, as its index tells."""
    columns = [pq.read_table(part, columns=["token_count", "expected_tokens"]) for part in index_parts]
    tokens = np.concatenate(
        [sum(table.column(name).fill_null(0).to_numpy() for name in table.column_names) for table in columns]
    )
    return SampledRows(len(tokens), of_rows, relative_error(tokens, of_rows))


def relative_error(tokens: NDArray[np.int64], of_rows: int) -> float | None:
    """By how much of itself the sum of a sample's rows, scaled to all, is off 19 times of 20 at most.

    From how far neighbouring runs are apart, as for any systematic sample: what changes slowly along the input is in
    every sample and adds no error. None for fewer than eight runs, or for nothing.
    """
    runs = tokens[: len(tokens) // RUN_ROWS * RUN_ROWS].reshape(-1, RUN_ROWS).mean(axis=1)
    if len(runs) < 8 or not runs.sum():
        return None
    variance = np.square(np.diff(runs)).sum() / 2 / (len(runs) - 1)
    left_out = max(0.0, 1 - len(tokens) / of_rows)
    return float(WIDTH * math.sqrt(variance * left_out / len(runs)) / runs.mean())
