"""Writes the report table of tokens per expert."""

from __future__ import annotations

from pathlib import Path

from batchinfer.core.samples import ExpertTokens
from batchinfer.report.tables.columns.declared import EXPERTS, SCHEMAS
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.spool import Spool


def write_experts(folder: Path, run_id: str, loads: ExpertTokens) -> Path:
    """Write the report table `experts` of a run atomically, and return its path.

    Args:
        folder: The folder of report tables.
        run_id: The id of the run.
        loads: For each layer the number of tokens of each expert.

    Raises:
        OSError: The table cannot be written.
    """
    with Spool(table_path(folder, EXPERTS, run_id), SCHEMAS[EXPERTS]) as spool:
        for layer, tokens in sorted(loads.items()):
            mean = sum(tokens) / len(tokens)
            for expert, count in enumerate(tokens):
                spool.append((run_id, layer, expert, count, count / mean if mean else None))
        return spool.finish()
