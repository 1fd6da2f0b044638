"""The answers that the rows of a plan had in the job's last result.

A row is found by its id. The texts are written to earlier.parquet, next to the plan and in its order: seq, text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.filesystem.duck import connection, parquet
from batchinfer.filesystem.durable import FileOps, storage
from batchinfer.store.answers.completion_store import write_table

_COLUMNS = ("custom_id", "generated_text")
_SEVERAL = "sample_index"  # the column of a result that has several answers to a row
_ROWS_READ = 4096
_CHARACTERS = 32  # of a text for each token that the new answer may have: none has more to gain


@dataclass(frozen=True, slots=True)
class LastResult:
    """The files of a result with one text for each row of the input."""

    files: Sequence[Path]

    @classmethod
    def of(cls, files: Sequence[Path]) -> LastResult | None:
        """Return the result in these files; None where its answers are others than one text a row."""
        if not files:
            return None
        schema = pq.read_schema(files[0])
        names = {*schema.names}
        if (
            not names >= {*_COLUMNS}
            or _SEVERAL in names
            or schema.field("generated_text").type != pa.string()
        ):
            return None
        return cls(files)

    def last_texts(self, characters: int) -> list[str]:
        """Return the last answers of the result, about so many characters of them. Raises StorageError."""
        texts: list[str] = []
        for path in reversed(self.files):
            with storage(path, "read"), pq.ParquetFile(path) as file:
                for group in reversed(range(file.num_row_groups)):
                    found = file.read_row_group(group, ["generated_text"]).column(0).drop_null().to_pylist()
                    while found and characters > 0:
                        texts.append(found.pop())
                        characters -= 1 + len(texts[-1])
                    if characters <= 0:
                        return texts[::-1]
        return texts[::-1]

    def write_answers(
        self, plan: Path, index_parts: Sequence[Path], spill: Path, ops: FileOps
    ) -> Path | None:
        """Write the answers for the requests of a plan, those that are greedy, and return the file; None if no row has
        an id. Raises StorageError, OutOfMemory."""
        path = plan.with_name("earlier.parquet")
        with connection(spill) as database:
            database.execute(
                "CREATE TEMP TABLE wanted AS SELECT DISTINCT ON (seq) seq, custom_id, expected_tokens FROM "
                f"(SELECT seq, key, expected_tokens FROM {parquet([plan])}) JOIN "
                f"(SELECT key, custom_id FROM {parquet(index_parts)} WHERE greedy) USING (key)"
            )
            if database.execute("SELECT count(custom_id) FROM wanted").fetchall() == [(0,)]:
                return None
            database.execute(
                f"CREATE TEMP VIEW result AS SELECT {', '.join(_COLUMNS)} FROM {parquet(self.files)} "
                "WHERE generated_text IS NOT NULL"
            )
            write_table(path, database.sql(_ANSWERS).to_arrow_reader(_ROWS_READ), ops)
        return path


_ANSWERS = f"""
SELECT DISTINCT ON (seq) seq, left(generated_text, {_CHARACTERS} * expected_tokens) AS text
FROM wanted JOIN (FROM result WHERE custom_id IS NOT NULL) USING (custom_id) ORDER BY seq
"""
