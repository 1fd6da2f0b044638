"""A workload as JSONL, for any other engine."""

from __future__ import annotations

import json
from pathlib import Path

from batchinfer.bench.workloads import Row, Workload
from batchinfer.filesystem.durable import FileOps, write_new


def export_workload(workload: Workload, path: Path) -> None:
    """One object a row: prompt_token_ids and max_tokens. Raises OutputConflict for an existing file, StorageError."""
    lines = (json.dumps(_object(row), separators=(",", ":")) + "\n" for row in workload.rows)
    write_new(path, (line.encode() for line in lines), FileOps())


def _object(row: Row) -> dict[str, object]:
    return {"prompt_token_ids": row.prompt, "max_tokens": row.max_tokens}
