"""Samples rows from the whole input, and estimates the error of the estimates that are scaled up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.input.job_input import input_files, open_input
from batchinfer.input.reader import SpreadSample
from batchinfer.job import Job
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.prefixes import PlannedPrefix

# Neighbouring rows often share a document or a length. Short runs of rows capture both.
RUN_ROWS = 16
WIDTH = 1.96  # standard errors on either side of an estimate, for 95 % confidence


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The size of a sample of rows, and the error of estimates from it.

    Attributes:
        rows: Rows of the sample.
        of_rows: Rows of the whole input.
        error: Relative error of token counts at 95 % confidence. None if the sample is too small.
    """

    rows: int
    of_rows: int
    error: float | None = None

    @property
    def factor(self) -> float:
        """Return the factor by which counts of the sample are multiplied to estimate counts of the whole input."""
        return self.of_rows / self.rows

    def whole_plan(self, plan: Plan) -> Plan:
        """Return a plan of the sample with its counts scaled to the whole input.

        Duplicates and shared tokens are underestimated: a row whose duplicate is outside the sample looks unique.
        """
        counts = ("error_rows", "distinct", "duplicates", "present", "to_run")
        tokens = ("prompt_tokens", "expected_tokens", "shared_prefix_tokens")
        scaled = {name: round(getattr(plan, name) * self.factor) for name in (*counts, *tokens)}
        return replace(plan, rows=self.of_rows, **scaled)

    def whole_prefix(self, node: PlannedPrefix) -> PlannedPrefix:
        """Return a shared prefix of the sample, with its requests and saved tokens scaled to the whole input."""
        users = round(node.users * self.factor)
        return replace(node, users=users, saved_tokens=node.own_tokens * (users - 1))


def strata_of(job: Job, rows: int) -> tuple[SpreadSample, int] | None:
    """Return how to draw a sample of about `rows` rows from the whole input, and the number of rows of the input.

    Returns None if the input has at most `rows` rows, so no sample is needed. Counts the rows of the whole input first.
    """
    found = open_input(job, input_files(job)).count(job.input.limit)
    if found <= rows:
        return None
    run = min(RUN_ROWS, rows)
    return SpreadSample(math.ceil(run * found / rows), run), found


def sampled_rows(index_parts: Sequence[Path], of_rows: int) -> SampledRows:
    """Return the size of a sample of rows, and the error of token counts that are estimated from it.

    Args:
        index_parts: Parquet files of the index of the sampled rows.
        of_rows: Rows of the whole input.
    """
    columns = [pq.read_table(part, columns=["token_count", "expected_tokens"]) for part in index_parts]
    tokens = np.concatenate(
        [sum(table.column(name).fill_null(0).to_numpy() for name in table.column_names) for table in columns]
    )
    return SampledRows(len(tokens), of_rows, relative_error(tokens, of_rows))


def relative_error(tokens: NDArray[np.int64], of_rows: int) -> float | None:
    """Estimate the relative error (95 % confidence) of a token count that is scaled from a sample to the whole input.

    The sample consists of groups of RUN_ROWS consecutive rows. The error is estimated from the differences between
    neighbouring groups, so slow changes along the input add no error. Returns None for fewer than eight groups or no
    tokens.

    Args:
        tokens: Tokens of each row of the sample, in input order.
        of_rows: Rows of the whole input.
    """
    runs = tokens[: len(tokens) // RUN_ROWS * RUN_ROWS].reshape(-1, RUN_ROWS).mean(axis=1)
    if len(runs) < 8 or not runs.sum():
        return None
    variance = np.square(np.diff(runs)).sum() / 2 / (len(runs) - 1)
    left_out = max(0.0, 1 - len(tokens) / of_rows)
    return float(WIDTH * math.sqrt(variance * left_out / len(runs)) / runs.mean())
