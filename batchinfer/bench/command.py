"""The entry point of `batchinfer bench`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchinfer.bench.options import BenchOptions
from batchinfer.filesystem.durable import refuse_existing


def run_or_export(options: BenchOptions, notice: Callable[[str], None]) -> tuple[str, dict[str, Any]]:
    """Run the workloads of `batchinfer bench`, or export one workload to the file `options.export` if it is set.

    Args:
        options: The options of the command.
        notice: Called with a line of text for each step of the work.

    Returns:
        The result as text for people, and as a JSON object.

    Raises:
        UsageError: The options are wrong.
        OutputConflict: The file to export to exists.
    """
    # Import torch only after the options have been checked
    from batchinfer.bench.export import export_workload
    from batchinfer.bench.session import run_bench, workload_of

    options.check()
    if options.export is None:
        report = run_bench(options, notice)
        return report.table(), report.json
    refuse_existing(options.export)
    workload = workload_of(options, options.workloads[0])
    export_workload(workload, options.export)
    facts = {"export": str(options.export), "workload": workload.name, "rows": len(workload.rows)}
    return f"wrote {len(workload.rows):,} rows of {workload.name} to {options.export}", facts
