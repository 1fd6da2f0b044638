"""Prepared batches become index rows and tokens on disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.core.request import RowError
from batchinfer.core.sampling import SamplingParams
from batchinfer.data.index.index import ENDPOINT, INDEX_SCHEMA, Layout
from batchinfer.data.index.token_store import TokenWriter
from batchinfer.data.input.rows import RowBatch
from batchinfer.data.prompts.prepare import Prepared
from batchinfer.data.storage.durable import FileOps
from batchinfer.data.storage.part_writer import PartWriter


class IndexWriter:
    """Use as a context manager; `commit()` at the end. Rows get their ids in the order of `append`."""

    def __init__(self, layout: Layout, max_model_len: int, endpoints: bool, ops: FileOps) -> None:
        self._max_model_len = max_model_len
        self._endpoints = endpoints
        self._schema = INDEX_SCHEMA.append(ENDPOINT) if endpoints else INDEX_SCHEMA
        self._parts = PartWriter(layout.index, self._schema, ops)
        self._tokens = TokenWriter(layout.tokens, ops)
        self.rows = 0
        self.error_rows = 0
        self.logprobs: int | None = None  # the most that a row asks for; None: no row asks

    @property
    def total_tokens(self) -> int:
        return self._tokens.tokens

    def append(
        self, batch: RowBatch, ids: Sequence[str | None], alive: Sequence[int], done: Prepared
    ) -> None:
        """Write one batch. `alive` are the positions of the rows that were prepared, in the order of `done`."""
        size = len(batch.rows)
        errors = {i: row for i, row in enumerate(batch.rows) if isinstance(row, RowError)}
        errors |= {alive[i]: error for i, error in done.errors.items()}
        start = self._tokens.append(done.tokens)
        columns = self._work_columns(size, np.asarray(alive, np.int64), done, start)
        columns |= _error_columns(size, errors)
        columns["row_id"] = pa.array(np.arange(self.rows, self.rows + size), pa.int64())
        columns["file"] = pa.array([batch.file] * size, pa.string())
        columns["row_index"] = pa.array(np.arange(batch.first_row, batch.first_row + size), pa.int64())
        columns["custom_id"] = pa.array(ids, pa.string())
        if self._endpoints:
            columns["endpoint"] = pa.array([_endpoint(row) for row in batch.rows], pa.string())
        self._parts.append(pa.record_batch([columns[n] for n in self._schema.names], self._schema))
        self.rows += size
        self.error_rows += len(errors)

    def _work_columns(
        self, size: int, alive: np.ndarray[Any, np.dtype[np.int64]], done: Prepared, start: int
    ) -> dict[str, pa.Array]:
        counts = np.zeros(size, np.int32)
        counts[alive] = done.counts
        dead = counts == 0
        most = np.ones(size, np.int64)
        most[alive] = done.max_tokens
        expected = np.minimum(most, self._max_model_len - counts.astype(np.int64))
        offsets = start + np.concatenate([[0], np.cumsum(counts, dtype=np.int64)[:-1]])
        keys = np.zeros((size, 32), np.uint8)
        keys[alive] = np.frombuffer(done.keys, np.uint8).reshape(-1, 32)
        params = [SamplingParams.from_json(text) for text in done.params]
        self._note_logprobs(params)
        return _params_columns(size, alive.tolist(), done, params) | {
            "token_offset": pa.array(offsets, pa.int64(), mask=dead),
            "token_count": pa.array(counts, pa.int32(), mask=dead),
            "expected_tokens": pa.array(expected.astype(np.int32), pa.int32(), mask=dead),
            "key": pa.array(
                [None if d else k.tobytes() for k, d in zip(keys, dead, strict=True)], pa.binary(32)
            ),
        }

    def _note_logprobs(self, params: Sequence[SamplingParams]) -> None:
        asked = [p.logprobs for p in params if p.logprobs is not None]
        if asked:
            self.logprobs = max(*asked, self.logprobs or 0)

    def commit(self) -> None:
        """Everything on disk. Raises StorageError."""
        self._parts.commit()
        self._tokens.commit()

    @property
    def parts(self) -> Sequence[Any]:
        return self._parts.parts

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.__exit__()
        self._tokens.__exit__(None)


def _params_columns(
    size: int, alive: Sequence[int], done: Prepared, params: Sequence[SamplingParams]
) -> dict[str, pa.Array]:
    numbers: list[int | None] = [None] * size
    for position, number, tokens in zip(alive, done.params_of, done.counts, strict=True):
        numbers[position] = number if tokens else None  # a row without tokens is an error row
    return {
        "params": pa.array([None if n is None else done.params[n] for n in numbers], pa.string()),
        "greedy": pa.array([None if n is None else params[n].greedy for n in numbers], pa.bool_()),
    }


def _error_columns(size: int, errors: dict[int, RowError]) -> dict[str, pa.Array]:
    def column(name: str, kind: pa.DataType) -> pa.Array:
        return pa.array([getattr(errors.get(i), name, None) for i in range(size)], kind)

    return {
        "error_code": column("code", pa.string()),
        "error_class": column("error_class", pa.string()),
        "error_message": column("message", pa.string()),
        "retryable": column("retryable", pa.bool_()),
    }


def _endpoint(row: dict[str, Any] | RowError) -> str | None:
    url = None if isinstance(row, RowError) else row.get("url")
    return url if isinstance(url, str) else None
