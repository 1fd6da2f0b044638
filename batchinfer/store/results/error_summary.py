"""A summary of the errors of a job, with an example of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.compute as pc

from batchinfer.filesystem.rebatch import parquet_batches
from batchinfer.store.index.index import SAMPLE
from batchinfer.store.results.join import engine_errors

_COLUMNS = ["row_id", "file", "row_index", "error_code", "error_message", "retryable"]
_ROWS = 16_384


@dataclass(slots=True)
class ErrorSummary:
    """How many error rows by code, and where the first of each stands."""

    codes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    retryable: int = 0  # of the rows of index parts, or of published ones

    @property
    def rows(self) -> int:
        return self.codes.total()

    def text(self, most: int = 5) -> str:
        """The most frequent codes, one a line, each with its first row."""
        return "\n".join(
            f"  {count} × {code}, first {self.examples[code]}" for code, count in self.codes.most_common(most)
        )


def summarise_all_errors(
    index_parts: Sequence[Path], completion_parts: Sequence[Path], spill: Path, attempts: int = 1
) -> ErrorSummary:
    """Over the rows that could not become requests and those whose completion, of `attempts` ones, is an error."""
    found = summarise_errors(index_parts)
    for code, rows, example in engine_errors(index_parts, completion_parts, spill, attempts=attempts):
        found.codes[code] += rows
        found.examples.setdefault(code, example)
    return found


def summarise_errors(parts: Sequence[Path], samples: bool = False) -> ErrorSummary:
    """Over the error columns of index parts or of published files. `samples`: they have several answers to a row of the
    input, and rows are counted, not answers."""
    found = ErrorSummary()
    for batch in parquet_batches(parts, _ROWS, columns=[*_COLUMNS, *([SAMPLE.name] if samples else [])]):
        bad = batch.filter(pc.is_valid(batch.column("error_code")))
        bad = bad.filter(pc.equal(bad.column(SAMPLE.name), 0)) if samples else bad
        for row in bad.to_pylist():
            code = row["error_code"]
            found.codes[code] += 1
            found.retryable += row["retryable"] is True
            place = f"{row['file']} row {row['row_index']}: {row['error_message']}"
            found.examples.setdefault(code, place)
    return found
