"""Exports a workload as JSONL, for other engines."""

from __future__ import annotations

import json
from pathlib import Path

from batchinfer.bench.workloads import Row, Workload
from batchinfer.filesystem.durable import FileOps, write_new


def export_workload(workload: Workload, path: Path) -> None:
    """Write a workload to a new JSONL file, with the keys prompt_token_ids and max_tokens per row.

    Raises:
        OutputConflict: The file exists.
        StorageError: Writing failed.
    """
    lines = (json.dumps(_object(row), separators=(",", ":")) + "\n" for row in workload.rows)
    write_new(path, (line.encode() for line in lines), FileOps())


def _object(row: Row) -> dict[str, object]:
    return {"prompt_token_ids": row.prompt, "max_tokens": row.max_tokens}
