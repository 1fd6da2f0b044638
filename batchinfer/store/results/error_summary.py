"""A summary of the errors of a job, with an example of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.compute as pc

from batchinfer.filesystem.rebatch import parquet_batches
from batchinfer.store.index.index import SAMPLE
from batchinfer.store.results.join import count_engine_errors

_COLUMNS = ["row_id", "file", "row_index", "error_code", "error_message", "retryable"]
_ROWS = 16_384


@dataclass(slots=True)
class ErrorSummary:
    """The number of error rows per error code, and an example of each code.

    Attributes:
        codes: The number of error rows by code.
        examples: Location and message of the first row by code.
        retryable: The number of retryable error rows, as counted by `summarise_errors`.
            `summarise_all_errors` does not count retryable errors of completions.
    """

    codes: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    retryable: int = 0

    @property
    def rows(self) -> int:
        """Return the number of error rows of all codes."""
        return self.codes.total()

    def text(self, most: int = 5) -> str:
        """Return a list of error codes for users, each with its number of rows and the first row.

        Args:
            most: Maximum number of codes. The most frequent ones are listed.
        """
        return "\n".join(
            f"  {count} × {code}, first {self.examples[code]}" for code, count in self.codes.most_common(most)
        )


def summarise_all_errors(
    index_parts: Sequence[Path], completion_parts: Sequence[Path], spill: Path, attempts: int = 1
) -> ErrorSummary:
    """Summarise the error rows of a job.

    They are rows that could not become requests, and rows whose completion is an error.

    Args:
        index_parts: Parts of the index.
        completion_parts: Parts of the store.
        spill: Folder for temporary files.
        attempts: Maximum attempts per row.
    """
    found = summarise_errors(index_parts)
    for code, rows, example in count_engine_errors(index_parts, completion_parts, spill, attempts=attempts):
        found.codes[code] += rows
        found.examples.setdefault(code, example)
    return found


def summarise_errors(parts: Sequence[Path], samples: bool = False) -> ErrorSummary:
    """Summarise the errors in the columns of index parts or of a result's files.

    Args:
        parts: The Parquet files.
        samples: True if the files have several answers per input row. An input row is then counted once.
    """
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
