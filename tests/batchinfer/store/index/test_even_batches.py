"""Batches whose sizes follow only from the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.filesystem.durable import FileOps
from batchinfer.filesystem.part_writer import PartWriter
from batchinfer.store.index.even_batches import BATCH_ROWS, MOST_ROWS, EvenBatches


class _Noted(PartWriter):
    """Records the size of each batch."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        super().__init__(folder, schema, FileOps())
        self.came: list[int] = []

    def append(self, batch: pa.RecordBatch) -> None:
        self.came.append(batch.num_rows)
        super().append(batch)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("values", "most"),
    [
        (["short"], MOST_ROWS),
        (["x" * 20_000], BATCH_ROWS),  # ten megabytes
        ([[1.0, 2.0]], BATCH_ROWS),  # the size of lists is not counted
        ([1], MOST_ROWS),
    ],
)
@pytest.mark.parametrize("cut", [100, 512, 3000])
def test_rows_come_in_batches_that_do_not_depend_on_how_they_came(
    tmp_path: Path, values: list[Any], most: int, cut: int
) -> None:
    table = pa.table({"a": pa.array(values * (MOST_ROWS + 700))})
    digests = []
    for size in (cut, 1024):
        folder = tmp_path / str(size)
        folder.mkdir()
        with _Noted(folder, table.schema) as writer:
            even = EvenBatches(writer, table.schema)
            for batch in table.to_batches(size):
                even.append(batch)
            (part,) = even.commit()
        assert set(writer.came[:-1]) == {most}
        assert pq.read_table(part) == table
        digests.append(part.read_bytes())
    assert digests[0] == digests[1]
