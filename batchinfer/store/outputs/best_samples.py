"""The best answers to a row, which are published where more were computed, are those whose tokens are the likeliest."""

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
    """Return how many rows of a result so many rows of its index become, which are whole rows of the input."""
    return rows if best is None else rows // best.computed * best.rows


def indexed_rows(best: BestOf | None, rows: int) -> int:
    """Return of how many rows of the index so many rows of the result are made: a multiple of what a row has."""
    return rows if best is None else rows // best.rows * best.computed


def best_samples(best: BestOf, table: pa.Table, matched: pa.Table) -> Marks:
    """Mark the rows that are published, of whole rows of the input: the answers with the highest mean log-probability
    of their tokens, of equal ones the first, and errors only where there are too few answers.

    table: the rows of the result; matched: the completion of each.
    """
    likely = np.where(pc.equal(table.column("status"), "ok").to_numpy(), _means(matched), -np.inf)
    order = np.argsort(-likely.reshape(-1, best.computed), axis=1, kind="stable")
    marks = np.zeros(order.shape, np.bool_)
    np.put_along_axis(marks, order[:, : best.published], values=True, axis=1)
    return marks.reshape(-1)


def _means(matched: pa.Table) -> NDArray[np.float64]:
    """Return the mean log-probability of each answer's tokens; the least number where it has none, or one is no number.
    Each is added up by itself: it does not depend on its neighbours."""
    column = matched.column("logprobs").combine_chunks()
    lists = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
    ends, values = lists.offsets.to_numpy(), lists.values.to_numpy(zero_copy_only=False).astype(np.float64)
    means = [values[start:end].mean() if end > start else _LEAST for start, end in pairwise(ends.tolist())]
    return np.nan_to_num(np.array(means, np.float64), nan=_LEAST, neginf=_LEAST)
