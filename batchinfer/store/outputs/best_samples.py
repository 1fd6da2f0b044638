"""Chooses the samples with the most likely tokens, if not all samples are published."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.store.index.index import BestOf

_LEAST = float(np.finfo(np.float64).min)
Marks = NDArray[np.bool_]


def published_rows(best: BestOf | None, rows: int) -> int:
    """Return the number of result rows that are made from `rows` rows of the index.

    Args:
        best: How many samples of each input row are computed and published. None: all are published.
        rows: Number of index rows. They must include all samples of an input row.
    """
    return rows if best is None else rows // best.computed * best.rows


def indexed_rows(best: BestOf | None, rows: int) -> int:
    """Return the number of index rows from which `rows` result rows are made.

    Args:
        best: How many samples of each input row are computed and published. None: all are published.
        rows: Number of result rows. They must include all published samples of an input row.
    """
    return rows if best is None else rows // best.rows * best.computed


def best_samples(best: BestOf, table: pa.Table, matched: pa.Table) -> Marks:
    """Return which samples are published: a boolean per row of `table`.

    The samples with the highest mean log-probability per token are chosen. Among equal ones, the first is
    chosen. Errors are only chosen if there are too few answers.

    Args:
        best: How many samples of each input row are computed and published.
        table: One row per sample, with all samples of each input row.
        matched: The completion of each row of `table`.
    """
    likely = np.where(pc.equal(table.column("status"), "ok").to_numpy(), _means(matched), -np.inf)
    order = np.argsort(-likely.reshape(-1, best.computed), axis=1, kind="stable")
    marks = np.zeros(order.shape, np.bool_)
    np.put_along_axis(marks, order[:, : best.published], values=True, axis=1)
    return marks.reshape(-1)


def _means(matched: pa.Table) -> NDArray[np.float64]:
    # Each mean is computed separately, so it does not depend on other rows
    column = matched.column("logprobs").combine_chunks()
    lists = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    ends, values = lists.offsets.to_numpy(), lists.values.to_numpy(zero_copy_only=False).astype(np.float64)
    means = [values[start:end].mean() if end > start else _LEAST for start, end in pairwise(ends.tolist())]
    return np.nan_to_num(np.array(means, np.float64), nan=_LEAST, neginf=_LEAST)
