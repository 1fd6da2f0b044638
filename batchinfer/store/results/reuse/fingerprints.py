"""Computes the fingerprint of each result file from everything that determines its bytes, before its rows are joined.

It covers the rows of the index, the values of passthrough columns, the position of each row's answer in the store, and
the code and settings that write files. A part of the store never changes, and its name is never used again. Files with
equal fingerprints have equal bytes. Equal files may have different fingerprints: an answer that moved to another part
of the store changes the fingerprint.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa

from batchinfer.core.version import __version__
from batchinfer.store.index.index import Index
from batchinfer.store.outputs.best_samples import indexed_rows
from batchinfer.store.outputs.registry import KINDS
from batchinfer.store.results.attempts import PART_SHIFT, Numbers
from batchinfer.store.results.index_rows import IndexRows
from batchinfer.store.results.join import ROW_IN_PART, Join
from batchinfer.store.results.manifest import PublishSpec
from batchinfer.store.results.result_files import spans_of
from batchinfer.store.results.result_rows import BATCH_ROWS, result_schema

WRITER_FORMAT = 1  # increase it when equal rows are written as different bytes
_NONE = -1  # the row has no stored answer


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """The fingerprints of a result's files: digests of everything that determines their bytes.

    Files with equal fingerprints have equal bytes.

    Attributes:
        files: The fingerprint (hex) of each file, in order.
        maker: A digest of the code and settings that write files.
        segments: The segments of the kept index with the first rows: folder and number of rows of each.
    """

    files: tuple[str, ...]
    maker: str
    segments: tuple[tuple[str, int], ...] = ()


NO_FINGERPRINTS = Fingerprints((), "")


def compute_fingerprints(
    index: Index, join: Join, spec: PublishSpec, threads: int, last: Fingerprints = NO_FINGERPRINTS
) -> Fingerprints:
    """Return the fingerprints of a result's files before they are written. Each row takes 8 bytes of memory.

    Args:
        index: The index.
        join: The positions of the answers of its rows.
        spec: The identity of the result.
        threads: Number of threads.
        last: The fingerprints of the last result. A file that only has reused rows keeps its fingerprint.

    Raises:
        InputCorrupt: The index is damaged.
    """
    made = _Fingerprints(index, join, spec)
    per_file = indexed_rows(index.best, spec.rows_per_file)
    reused = tuple((one.segment.folder, one.segment.rows) for one in index.reused.segments)
    same = last.maker == made.maker and join.reused_unchanged and last.segments[: len(reused)] == reused
    known = last.files[: index.reused.rows // per_file] if same else ()
    spans = spans_of(index.rows, per_file, threads, range(len(known)))
    with ThreadPoolExecutor(threads, "fingerprint") as pool:
        files = [*known, *(one for found in pool.map(made.of_span, spans) for one in found)]
    new = () if index.segments is None else index.segments.rows
    return Fingerprints(tuple(files), made.maker, (*reused, *new))


class _Fingerprints:
    def __init__(self, index: Index, join: Join, spec: PublishSpec) -> None:
        self._rows, self._join = IndexRows(index), join
        self._per_file = indexed_rows(index.best, spec.rows_per_file)
        self._places: Numbers = np.full(index.rows, _NONE, np.int64)
        self._places[join.rows] = join.positions
        self._head = _maker(index, spec)
        self.maker = hashlib.sha256(self._head).hexdigest()
        full, rest = divmod(self._per_file, BATCH_ROWS)
        self._sizes = [BATCH_ROWS] * full + [rest] * (rest > 0)

    def of_span(self, span: tuple[int, int]) -> list[str]:
        start, stop = span
        firsts = range(start, max(stop, start + 1), self._per_file)
        tables = self._rows.tables(start, stop, self._sizes)
        return [self._of_file(first, min(first + self._per_file, stop), tables) for first in firsts]

    def _of_file(self, first: int, stop: int, tables: Iterator[tuple[pa.Table, pa.Table]]) -> str:
        # `tables` yields the rows of this file next
        digest = hashlib.sha256(self._head)
        digest.update(f"{first} {stop}\n".encode())
        self._add_answers(digest, first, stop)
        at = first
        while at < stop:
            rows, values = next(tables)
            for table in (rows,) if values is rows else (rows, values):
                digest.update(_bytes_of(table))
            at += rows.num_rows
        return digest.hexdigest()

    def _add_answers(self, digest: Any, first: int, stop: int) -> None:
        places, attempts = self._places[first:stop], self._join.attempts
        numbers, which = np.unique(places >> PART_SHIFT, return_inverse=True)
        names = [None if number < 0 else self._join.parts[number].name for number in numbers.tolist()]
        digest.update(json.dumps([names, attempts is None]).encode() + b"\n")
        digest.update(which.astype("<i4").tobytes())
        digest.update((places & ROW_IN_PART).astype("<i8").tobytes())
        if attempts is not None:
            digest.update(attempts[first:stop].tobytes())


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _maker(index: Index, spec: PublishSpec) -> bytes:
    # Everything except rows and answers. `spec.identity` covers job and checkpoint
    kind, programs = KINDS[index.output], [version(name) for name in ("pyarrow", "tokenizers")]
    rows = [index.attempts, index.samples, index.logprobs, spec.rows_per_file]
    rows += [] if index.best is None else [*index.best[: 3 if index.best.lists else 2]]
    prior = () if index.scoring is None else index.scoring.prior
    shape: Sequence[object] = [kind.name, kind.version, *rows, *prior]
    material = [WRITER_FORMAT, __version__, programs, spec.identity, spec.numerics, shape]
    schema: bytes = result_schema(index).serialize().to_pybytes()
    return json.dumps(material).encode() + schema


def _bytes_of(table: pa.Table) -> pa.Buffer:
    # Dictionaries are decoded, since they may have values that no row uses
    types = [(field.name, _plain(field.type)) for field in table.schema]
    table = table.cast(pa.schema(types))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    return sink.getvalue()
