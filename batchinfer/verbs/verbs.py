"""What the smaller verbs do. They return text and facts; the command line prints them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchinfer.bench.options import BenchOptions
from batchinfer.core.errors import InputMissing
from batchinfer.core.sampling import SamplingParams
from batchinfer.core.sizes import size
from batchinfer.data.index.index import Index
from batchinfer.data.results.diff import DiffOptions, ResultDiff, diff_results
from batchinfer.data.results.find_state import find_state
from batchinfer.data.results.published import Problem, published
from batchinfer.data.results.verify import verify_result, verify_store
from batchinfer.data.storage.durable import refuse_existing
from batchinfer.data.storage.rebatch import parquet_batches
from batchinfer.data.storage.state import state_of
from batchinfer.data.storage.temporary import temporary_folder
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.machine.doctor import Fact, doctor
from batchinfer.plan.setup.dry_run import dry_run, first_index
from batchinfer.plan.setup.input_check import check_input
from batchinfer.plan.setup.job_setup import check_setup
from batchinfer.verbs.query import no_result

TOKENS_SHOWN = 64  # of a previewed prompt: what is amiss with a template shows at its ends


def validate_job(job: Job) -> list[str]:
    """Check a job as a run does before it computes, and prepare its first rows; what was found out."""
    state = state_of(job)
    setup = check_setup(job, state)
    checkpoint, setting, tokenizer = setup.checkpoint, setup.setting, setup.tokenizer
    found = [
        f"model: {checkpoint.spec.family}, {size(checkpoint.weight_bytes)} of weights, "
        f"to be run in {setting.arithmetic} on {setting.device}, up to {setting.max_model_len} tokens a row",
        *checkpoint.notices,
        f"tokenizer: {tokenizer.vocab_size} tokens, "
        + ("with a chat template" if tokenizer.chat_template else "without a chat template"),
    ]
    facts = check_input(job, setup, state)
    if facts.files:
        found.append(f"input: {facts.files} file{'s' * (facts.files != 1)}, {size(facts.bytes)}")
    if job.sampling.from_columns:
        found.append(f"sampling: rows set their own {job.sampling.row_parameters()}")
    if setup.most_tokens is not None:
        found.append(f"sampling: an answer has at most {setup.most_tokens:,} tokens (max_tokens: fit)")
    if setup.columns is not None:
        found.append("columns of answers: " + ", ".join(f"{f.name} {f.type}" for f in setup.columns.schema))
        found += [str(note) for note in setup.columns.notes]
    return [*found, *facts.warnings, *dry_run(job, setup), "the job file is right"]


@dataclass(frozen=True, slots=True)
class PreviewedRow:
    """A row as the model reads it: text with its special tokens, ids, parameters; or its error instead."""

    file: str
    row_index: int
    id: str | None
    text: str | None = None
    token_ids: list[int] | None = None
    sampling: dict[str, Any] | None = None
    error: dict[str, str] | None = None  # code, message
    own_sampling: dict[str, Any] | None = None  # those that differ from what all rows share

    @property
    def head(self) -> str:
        return f"── {self.file} row {self.row_index}" + (f", id {self.id}" if self.id else "")

    @property
    def body(self) -> str:
        """Of long prompts the first and the last tokens."""
        if self.error is not None:
            return f"error {self.error['code']}: {self.error['message']}\n"
        ids = [str(number) for number in self.token_ids or ()]
        if len(ids) > TOKENS_SHOWN:
            shown = [*ids[: TOKENS_SHOWN // 2], "…", *ids[-TOKENS_SHOWN // 2 :]]
        else:
            shown = ids
        own = f"sampling of this row: {_parameters(self.own_sampling)}\n" if self.own_sampling else ""
        return f"{self.text}\n{len(ids)} tokens: {' '.join(shown)}\n{own}"


def preview_job(job: Job, rows: int, notice: Callable[[str], None]) -> Iterator[PreviewedRow]:
    """The first rows as the model reads them; `notice` gets what the input's check warns of."""
    state = state_of(job)
    setup = check_setup(job, state, replace=True)
    for warning in check_input(job, setup, state).warnings:
        notice(warning)
    fewest = rows if job.input.limit is None else min(rows, job.input.limit)
    few = job.model_copy(
        update={
            "input": job.input.model_copy(update={"limit": fewest}),
            "output": job.output.model_copy(update={"columns": ()}),
        }
    )
    with temporary_folder("preview") as scratch:
        index = first_index(few, setup, Path(scratch), rows)
        for batch in parquet_batches(index.index_parts, rows):
            for row in batch.to_pylist():
                yield _previewed(row, index, setup.tokenizer, _shared_sampling(job))


def _shared_sampling(job: Job) -> SamplingParams:
    """The parameters of a row that sets none of its own. Each OpenAI request is shown beside the plain defaults."""
    return SamplingParams() if job.prompt is None else job.params()


def sampling_of_all(job: Job) -> list[str]:
    """How the rows of a job are sampled, for people, before the rows themselves are shown."""
    if job.prompt is None:
        return ["sampling: each request sets its own"]
    given = _parameters(_differences(job.params(), SamplingParams()))
    lines = [f"sampling: {given or 'all parameters have their default values'}"]
    if job.sampling.from_columns:
        lines.append(f"rows set their own {job.sampling.row_parameters()}")
    return lines


def _differences(params: SamplingParams, others: SamplingParams) -> dict[str, Any]:
    """The parameters in which `params` differs from `others`."""
    usual = asdict(others)
    return {key: value for key, value in asdict(params).items() if value != usual[key]}


def _parameters(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())


def _previewed(
    row: dict[str, Any], index: Index, tokenizer: Tokenizer, shared: SamplingParams
) -> PreviewedRow:
    place = (row["file"], row["row_index"], row["custom_id"])
    if row["key"] is None:
        return PreviewedRow(*place, error={"code": row["error_code"], "message": row["error_message"]})
    ids = index.tokens.read(row["token_offset"], row["token_count"]).tolist()
    text = tokenizer.rust.decode(ids, skip_special_tokens=False)
    params = SamplingParams.from_json(row["params"])
    return PreviewedRow(*place, text, ids, asdict(params), own_sampling=_differences(params, shared))


@dataclass(frozen=True, slots=True)
class Verified:
    """What is damaged, and what was looked at besides the result."""

    problems: list[Problem]
    store: Path | None  # of the answers that were checked
    unchecked: str | None = None  # why there is none


def verify_results(results: Path) -> Verified:
    """Read a result and its stored completions whole."""
    state, problems = find_state(results), verify_result(results)
    if state.completions.is_dir():
        return Verified([*problems, *verify_store(state.completions)], state.completions)
    why = f"the stored answers were not checked: there is no folder {state.completions}"
    if state.shares_store:
        return Verified(problems, None, f"{why}, where the job's last run stored them")
    return Verified(problems, None, f"{why}; a store at cache.path is found once the job has run again")


def compare_results(a: Path, b: Path, options: DiffOptions) -> ResultDiff:
    """What differs between two results of the same rows. Raises InputMissing, UsageError, StorageError, OutOfMemory."""
    return diff_results(_files(a), _files(b), options)


def _files(results: Path) -> tuple[Path, ...]:
    found = published(results)
    if found is None:
        raise InputMissing(no_result(results))
    return found.files


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
