"""What the smaller verbs do. They return text and facts; the command line prints them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from batchinfer.bench.options import BenchOptions
from batchinfer.data.durable import FileOps, refuse_existing, storage, write_new
from batchinfer.data.index import Index
from batchinfer.data.rebatch import parquet_batches
from batchinfer.data.state import StateFolder
from batchinfer.data.tokenizer import Tokenizer
from batchinfer.data.verify import Problem, verify_result, verify_store
from batchinfer.errors import UsageError
from batchinfer.job import Job
from batchinfer.preflight import check_input, check_setup, first_index, rehearse
from batchinfer.report.doctor import Fact, doctor

TOKENS_SHOWN = 64  # of a previewed prompt: what is amiss with a template shows at its ends


def validate_job(job: Job) -> list[str]:
    """Check a job as a run does before it computes, and prepare its first rows; what was found out."""
    state = _state(job)
    setup = check_setup(job, state)
    checkpoint, setting, tokenizer = setup.checkpoint, setup.setting, setup.tokenizer
    found = [
        f"model: {checkpoint.config.family}, {checkpoint.weight_bytes / 2**20:,.1f} MiB of weights, "
        f"to be run in {setting.arithmetic} on {setting.device}, up to {setting.max_model_len} tokens a row",
        f"tokenizer: {tokenizer.vocab_size} tokens, "
        + ("with a chat template" if tokenizer.chat_template else "without a chat template"),
    ]
    facts = check_input(job, setup, state)
    if facts.files:
        found.append(f"input: {facts.files} file{'s' * (facts.files != 1)}, {facts.bytes / 2**20:,.1f} MiB")
    if job.sampling.from_columns:
        found.append(f"sampling: rows set their own {job.sampling.row_parameters()}")
    return [*found, *facts.warnings, *rehearse(job, setup), "the job file is right"]


def preview_job(job: Job, rows: int) -> Iterator[str]:
    """The first rows as the model reads them: text with its special tokens, ids, parameters, or their error."""
    state = _state(job)
    setup = check_setup(job, state, replace=True)
    facts = check_input(job, setup, state)
    if job.sampling.from_columns:
        yield f"rows set their own {job.sampling.row_parameters()}\n"
    yield from (f"{warning}\n" for warning in facts.warnings)
    fewest = rows if job.input.limit is None else min(rows, job.input.limit)
    few = job.model_copy(
        update={
            "input": job.input.model_copy(update={"limit": fewest}),
            "output": job.output.model_copy(update={"columns": ()}),
        }
    )
    with tempfile.TemporaryDirectory(prefix="batchinfer-preview-") as scratch:
        index = first_index(few, setup, Path(scratch), rows)
        for batch in parquet_batches(index.index_parts, rows):
            for row in batch.to_pylist():
                yield _previewed(row, index, setup.tokenizer)


def _state(job: Job) -> StateFolder:
    return StateFolder(job.output.path, cache=job.cache.path if job.cache else None)


def _previewed(row: dict[str, Any], index: Index, tokenizer: Tokenizer) -> str:
    head = f"── {row['file']} row {row['row_index']}" + (
        f", id {row['custom_id']}" if row["custom_id"] else ""
    )
    if row["key"] is None:
        return f"{head}\nerror {row['error_code']}: {row['error_message']}\n"
    ids = index.tokens.read(row["token_offset"], row["token_count"]).tolist()
    shown = ids if len(ids) <= TOKENS_SHOWN else [*ids[: TOKENS_SHOWN // 2], "…", *ids[-TOKENS_SHOWN // 2 :]]
    text = tokenizer.rust.decode(ids, skip_special_tokens=False)
    return f"{head}\n{text}\n{len(ids)} tokens: {' '.join(map(str, shown))}\nsampling: {row['params']}\n"


def verify_results(results: Path) -> list[Problem]:
    """Read a result and its stored completions whole; what is damaged."""
    state = StateFolder(results)
    stored = verify_store(state.completions) if state.completions.is_dir() else []
    return [*verify_result(results), *stored]


def init_folder(folder: Path, files: dict[str, str]) -> list[Path]:
    """Write a new job's files. Raises UsageError when one is there already, StorageError."""
    there = [name for name in files if os.path.lexists(folder / name)]
    if there:
        raise UsageError(f"{folder / there[0]}: exists already; choose another folder")
    with storage(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_new(folder / name, [text.encode()], FileOps())
    return [folder / name for name in files]


def machine_facts() -> list[Fact]:
    """What `doctor` says."""
    return doctor()


def bench(options: BenchOptions, notice: Callable[[str], None]) -> tuple[str, dict[str, Any]]:
    """Run benchmarks, or export one: text for people, and an object for machines. Raises UsageError and others."""
    from batchinfer.bench.export import export_workload  # torch is not imported before an option is wrong
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
