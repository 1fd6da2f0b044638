"""Implements `batchinfer preview`: shows the first rows of a job as the model would read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from batchinfer.core.sampling import DERIVED, SamplingParams
from batchinfer.filesystem.rebatch import parquet_batches
from batchinfer.filesystem.state import state_of
from batchinfer.filesystem.temporary import temporary_folder
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job
from batchinfer.pipeline.engine_machine import engine_machine
from batchinfer.plan.setup.input_check import check_input, first_index
from batchinfer.plan.setup.job_setup import check_setup
from batchinfer.store.index.index import Index

_ANSWERS = {
    "embed": "a vector",
    "score": "how likely a text is",
    "classify": "a label",
    "rerank": "how relevant a document is",
}  # kinds of answers that are no texts
TOKENS_SHOWN = 64  # tokens of a prompt; mistakes of a template are visible at both ends
CONTINUATIONS_SHOWN = 20  # continuations of a row, which may have 1,000


@dataclass(frozen=True, slots=True)
class Continuation:
    """A label or another text whose tokens are scored after the prompt of a row."""

    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class PreviewedRow:
    """A row of the input as the model would read it, or its error.

    Attributes:
        file: The name of the input file.
        row_index: The number of the row in the file, from 0.
        id: The id of the row, or None.
        text: The prompt with special tokens, or None for an error row.
        token_ids: The token ids of the prompt, or None for an error row.
        sampling: All sampling parameters of the row by name, or None for an error row.
        error: The `code` and `message` of the row's error, or None.
        own_sampling: Only the sampling parameters whose values differ from the job's.
        continuations: The texts that are scored after the prompt, or None.
    """

    file: str
    row_index: int
    id: str | None
    text: str | None = None
    token_ids: list[int] | None = None
    sampling: dict[str, Any] | None = None
    error: dict[str, str] | None = None
    own_sampling: dict[str, Any] | None = None
    continuations: list[Continuation] | None = None

    @property
    def head(self) -> str:
        """Return the heading of the row: its file, number and id."""
        return f"── {self.file} row {self.row_index}" + (f", id {self.id}" if self.id else "")

    @property
    def body(self) -> str:
        """Return the lines about the row: text, token ids and continuations, or the error.

        Long prompts and lists are shortened in the middle.
        """
        if self.error is not None:
            return f"error {self.error['code']}: {self.error['message']}\n"
        own = f"sampling of this row: {_parameters(self.own_sampling)}\n" if self.own_sampling else ""
        continued = self.continuations or []
        lines = [
            f"continuation {number} of {len(continued)}: {json.dumps(one.text, ensure_ascii=False)}, "
            f"{_tokens(one.token_ids)}"
            for number, one in enumerate(continued, 1)
        ]
        listed = "".join(f"{line}\n" for line in _ends(lines, CONTINUATIONS_SHOWN))
        return f"{self.text}\n{_tokens(self.token_ids or [])}\n{listed}{own}"


def _tokens(ids: list[int]) -> str:
    shown = " ".join(_ends([str(number) for number in ids], TOKENS_SHOWN))
    return f"{len(ids)} token{'' if len(ids) == 1 else 's'}: {shown}"


def _ends(items: list[str], most: int) -> list[str]:
    return items if len(items) <= most else [*items[: most // 2], "…", *items[-most // 2 :]]


def preview_job(job: Job, rows: int, notice: Callable[[str], None]) -> Iterator[PreviewedRow]:
    """Prepare the first rows of a job without computing answers, and yield them as the model would read them.

    Args:
        job: The job.
        rows: The number of rows.
        notice: Called with each warning about the input.
    """
    state = state_of(job)
    machine = engine_machine(job, state)
    setup = check_setup(job, state, machine.facts, replace=True, reader=machine.reader)
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
        for line in index.notices:
            notice(line)
        for batch in parquet_batches(index.index_parts, rows):
            for row in batch.to_pylist():
                yield _previewed(row, index, setup.tokenizer, job)


def _shared_sampling(job: Job) -> SamplingParams:
    if job.task != "generate":
        return SamplingParams()
    return SamplingParams() if job.requests else job.params()


def sampling_of_all(job: Job) -> list[str]:
    """Return lines for users about the sampling parameters that all rows share, and about parameters that rows set."""
    if job.task in _ANSWERS:
        return [f"task: {job.task}, the answer to each row is {_ANSWERS[job.task]}"]
    if job.requests:
        return ["sampling: each request sets its own"]
    given = _parameters(_differences(job.params(), SamplingParams()))
    lines = [f"sampling: {given or 'all parameters have their default values'}"]
    if job.sampling.from_columns:
        lines.append(f"rows set their own {job.sampling.row_parameters()}")
    return lines


def _differences(params: SamplingParams, others: SamplingParams) -> dict[str, Any]:
    usual = asdict(others)
    return {key: value for key, value in _set_by_people(params).items() if value != usual[key]}


def _set_by_people(params: SamplingParams) -> dict[str, Any]:
    # Derived parameters depend on a row's prompt
    return {name: value for name, value in asdict(params).items() if name not in DERIVED}


def _parameters(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items())


def _previewed(row: dict[str, Any], index: Index, tokenizer: Tokenizer, job: Job) -> PreviewedRow:
    place = (row["file"], row["row_index"], row["custom_id"])
    if row["key"] is None:
        return PreviewedRow(*place, error={"code": row["error_code"], "message": row["error_message"]})
    ids = index.tokens.read(row["token_offset"], row["token_count"]).tolist()
    params = SamplingParams.from_json(row["params"])
    parts = _parts(ids, params.scored if _is_continued(job) else ())
    text, *texts = (tokenizer.rust.decode(part, skip_special_tokens=False) for part in parts)
    continuations = [Continuation(*one) for one in zip(texts, parts[1:], strict=True)]
    shown = PreviewedRow(*place, text, parts[0], continuations=continuations or None)
    if not params.gives_tokens:
        return shown
    own = _differences(params, _shared_sampling(job))
    return replace(shown, sampling=_set_by_people(params), own_sampling=own)


def _is_continued(job: Job) -> bool:
    # False if the job scores the prompt itself, or nothing
    return job.task == "classify" or (job.task == "score" and job.score.continuation is not None)


def _parts(ids: list[int], lengths: Sequence[int]) -> list[list[int]]:
    ends = list(accumulate(lengths, initial=len(ids) - sum(lengths)))
    return [ids[start:end] for start, end in pairwise([0, *ends])]
