"""The answers to a plan's rows in the last result of the job, which serve as drafts.

Rows are matched by id. The texts are written to earlier.parquet in the folder of the plan, in its order: seq, text.
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
_SEVERAL = "sample_index"  # exists in a result with several answers per row
_ROWS_READ = 4096
_CHARACTERS = 32  # maximum characters of an earlier text per token of the new answer


@dataclass(frozen=True, slots=True)
class LastResult:
    """The last published result of a job, whose texts may serve as drafts in the next run.

    Attributes:
        files: The Parquet files of the result.
    """

    files: Sequence[Path]

    @classmethod
    def of(cls, files: Sequence[Path]) -> LastResult | None:
        """Return the result in these files, or None if its texts cannot serve as drafts.

        They can if the result has the columns of texts and custom_ids, with one text per input row.
        """
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
        """Return the last texts of the result, in order, with at least `characters` characters in total.

        All texts are returned if they are shorter. Raises StorageError.
        """
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
        """Write the texts of the last result for the greedy requests of a plan, which use them as drafts.

        Rows are matched by custom_id. Texts are truncated to the expected length of the answer.

        Args:
            plan: The file of the plan. The new file is written next to it.
            index_parts: Parts of the index.
            spill: Folder for temporary files.
            ops: File operations.

        Returns:
            The file with the columns `seq` (number of the request in the plan) and `text`, or None if no row
            has an id.

        Raises:
            StorageError: A file cannot be read or written.
            OutOfMemory: DuckDB exceeded its memory limit.
        """
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
