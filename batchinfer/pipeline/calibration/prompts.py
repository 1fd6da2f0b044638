"""Chooses calibration prompts from all parts of the input, in pseudo-random order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from batchinfer.core.request import TokenIds
from batchinfer.filesystem.rebatch import parquet_batches
from batchinfer.filesystem.temporary import temporary_folder
from batchinfer.job import Job
from batchinfer.plan.forecast.sampled_rows import strata_of
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.plan.setup.weights import LONGEST, MOST_TOKENS, ROWS_READ
from batchinfer.store.index.index import Index
from batchinfer.store.index.ingest import ingest, job_files, with_files


def calibration_prompts(job: Job, setup: Setup) -> tuple[TokenIds, ...]:
    """Choose different prompts of a job for a calibration, with at most MOST_TOKENS tokens in total.

    The first prompt is returned even if it is longer. Empty if the input has no valid row. The same input always
    gives the same prompts. Raises the errors of reading the input.
    """
    with temporary_folder("calibration") as scratch:
        job = with_files(job, job_files(job, Path(scratch)))
        strata = strata_of(job, ROWS_READ)
        options = setup.ingest_options(strata=None if strata is None else strata[0])
        index = ingest(job, setup.tokenizer, options, Path(scratch) / "index")
        return _choose(index)


def first_prompts(job: Job, setup: Setup, rows: int) -> tuple[TokenIds, ...]:
    """Return the prompts of a job's first rows, each different one once, with at most MOST_TOKENS tokens in total.

    The first prompt is returned even if it is longer. Raises the errors of reading the input.

    Args:
        job: The job.
        setup: Its setup.
        rows: The number of rows to read. Rows with errors give no prompt.
    """
    with temporary_folder("quality") as scratch:
        job = with_files(job, job_files(job, Path(scratch)))
        limit = rows if job.input.limit is None else min(rows, job.input.limit)
        job = job.model_copy(update={"input": job.input.model_copy(update={"limit": limit})})
        index = ingest(job, setup.tokenizer, setup.ingest_options(workers=1), Path(scratch) / "index")
        return _within_limit({ids.tobytes(): ids for ids in _prompts(index)}.values())


def _choose(index: Index) -> tuple[TokenIds, ...]:
    prompts = {ids.tobytes(): ids for ids in _prompts(index)}
    keys = sorted(prompts, key=lambda data: hashlib.sha256(data).digest())
    return _within_limit(prompts[key] for key in keys)


def _within_limit(prompts: Iterable[TokenIds]) -> tuple[TokenIds, ...]:
    found: list[TokenIds] = []
    left = MOST_TOKENS
    for ids in prompts:
        left -= len(ids)
        if left < 0 and found:
            break
        found.append(ids)
    return tuple(found)


def _prompts(index: Index) -> list[TokenIds]:
    found = []
    for batch in parquet_batches(index.index_parts, ROWS_READ):
        columns = (batch.column(name).to_pylist() for name in ("key", "token_offset", "token_count"))
        for key, offset, count in zip(*columns, strict=True):
            if key is not None:
                found.append(index.tokens.read(offset, min(count, LONGEST)))
    return found
