"""Reads earlier answers, which serve as drafts for a plan's requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.filesystem.rebatch import parquet_batches

_ROWS_READ = 4096


class GivenAnswers:
    """Reads earlier answers from a Parquet file, in the order of a plan. They serve as drafts.

    The file has an ascending column `seq` (the request's number in the plan) and the columns of the answers.
    """

    def __init__(self, path: Path) -> None:
        self._batches: Iterator[pa.RecordBatch] = parquet_batches([path], _ROWS_READ)
        self._seqs: NDArray[np.int64] = np.zeros(0, np.int64)
        self._answers: list[Mapping[str, Any]] = []

    def of(self, seqs: NDArray[np.int64]) -> list[Mapping[str, Any] | None]:
        """Return the earlier answers to some requests, or None for a request without one.

        Args:
            seqs: The numbers of the requests in the plan, ascending. They must follow the numbers of the
                previous call.

        Returns:
            For each request the values by column of the file.

        Raises:
            InputCorrupt: The file is damaged.
        """
        if not len(seqs):
            return []
        while not len(self._seqs) or self._seqs[-1] < seqs[-1]:
            batch = next(self._batches, None)
            if batch is None:
                break
            self._answers += batch.to_pylist()
            self._seqs = np.append(self._seqs, batch.column("seq").to_numpy())
        places = np.searchsorted(self._seqs, seqs)
        there = [at < len(self._seqs) and self._seqs[at] == seq for at, seq in zip(places, seqs, strict=True)]
        answers = [self._answers[at] if has else None for at, has in zip(places, there, strict=True)]
        past = int(np.searchsorted(self._seqs, seqs[-1], side="right"))
        self._seqs, self._answers = self._seqs[past:], self._answers[past:]
        return answers
