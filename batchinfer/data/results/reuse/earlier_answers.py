"""The answers that the rows of a plan had in the job's last result.

A row is found by where an equal row stood in that input, and then its tokens are taken as they are stored; else by its
id, and then its text is. They are written to earlier.parquet, beside the plan and in its order: seq, tokens or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.data.storage.duck import connection, parquet
from batchinfer.data.storage.durable import FileOps, storage
from batchinfer.data.store.completion_store import write_table

_COLUMNS = ("row_id", "custom_id", "generated_text")
_SEVERAL = "sample_index"  # the column of a result that has several answers to a row
_ROWS_READ = 4096
_CHARACTERS = 32  # of a text for each token that the new answer may have: none has more to gain
_NOTHING_STORED = "SELECT NULL::BLOB AS key, NULL::INTEGER[] AS token_ids WHERE false"


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
        self,
        plan: Path,
        index_parts: Sequence[Path],
        places: pa.RecordBatchReader,
        store_parts: Sequence[Path],
        spill: Path,
        ops: FileOps,
    ) -> Path | None:
        """Write the answers for the requests of a plan, those that are greedy, and return the file; None where no row
        can be found. `places`: where each row of the index stood before, as `earlier_places` returns it. Raises
        StorageError, OutOfMemory."""
        stored = f"SELECT key, token_ids FROM {parquet(store_parts)} WHERE error_code IS NULL"
        path = plan.with_name("earlier.parquet")
        with connection(spill) as database:
            database.register("places", places)
            database.execute("CREATE TEMP TABLE stood AS FROM places")
            database.execute(f"CREATE TEMP VIEW stored AS {stored if store_parts else _NOTHING_STORED}")
            database.execute(
                "CREATE TEMP TABLE wanted AS SELECT DISTINCT ON (seq) seq, row_id, custom_id, expected_tokens FROM "
                f"(SELECT seq, key, expected_tokens FROM {parquet([plan])}) JOIN "
                f"(SELECT key, row_id, custom_id FROM {parquet(index_parts)} WHERE greedy) USING (key)"
            )
            found = "SELECT (SELECT count(custom_id) FROM wanted), (SELECT count(*) FROM stood)"
            if database.execute(found).fetchall() == [(0, 0)]:
                return None
            database.execute(
                f"CREATE TEMP VIEW result AS SELECT {', '.join(_COLUMNS)} FROM {parquet(self.files)} "
                "WHERE generated_text IS NOT NULL"
            )
            write_table(path, database.sql(_ANSWERS).to_arrow_reader(_ROWS_READ), ops)
        return path


_ANSWERS = f"""
WITH stored_ones AS (
    SELECT DISTINCT ON (seq) seq, token_ids[:expected_tokens] AS tokens
    FROM wanted JOIN (SELECT row_id, key FROM stood WHERE key IS NOT NULL) USING (row_id) JOIN stored USING (key)
), others AS (
    FROM wanted ANTI JOIN stored_ones USING (seq)
), named AS (
    SELECT seq, generated_text, expected_tokens
    FROM others JOIN (SELECT custom_id, generated_text FROM result WHERE custom_id IS NOT NULL) USING (custom_id)
), placed AS (
    SELECT seq, generated_text, expected_tokens
    FROM (FROM others ANTI JOIN named USING (seq)) JOIN (SELECT row_id, place FROM stood) USING (row_id)
    JOIN (SELECT row_id AS place, generated_text FROM result) USING (place)
), texts AS (
    SELECT DISTINCT ON (seq) seq, left(generated_text, {_CHARACTERS} * expected_tokens) AS text
    FROM (FROM named UNION ALL FROM placed)
)
SELECT seq, tokens, text FROM (FROM stored_ones UNION ALL BY NAME FROM texts) ORDER BY seq
"""
