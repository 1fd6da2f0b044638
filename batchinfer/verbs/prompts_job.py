"""Makes a job from a model and a file of prompts, for commands that need rows but get no job file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from batchinfer.core.errors import InputMissing, UsageError
from batchinfer.core.request import RowError
from batchinfer.input.job_input import input_files, open_input
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.job import Job, load_job

TEXTS = (".txt", ".text")  # files with one prompt per line
COLUMNS = ("messages", "prompt", "text")  # the first one that a row has is used


def prompts_job(model: str, prompts: Path, scratch: Path, overrides: list[tuple[str, str]]) -> Job:
    """Return a job that runs a model on a file of prompts, for calibration without a job file.

    A row's prompt is its column `messages` (a chat), `prompt` (a user message, if the model has a chat template) or
    `text` (used as it is). A text file has one prompt per line.

    Args:
        model: The path or name of the model.
        prompts: The file of prompts.
        scratch: The folder that the job would write to.
        overrides: Pairs of a dotted key of the job file and its value.

    Raises:
        JobFileError: An override is invalid, or there is no such model.
        InputMissing: There is no such file.
        UsageError: The file has no column with prompts.
    """
    if not prompts.is_file():
        raise InputMissing(f"--prompts {prompts}: there is no such file")
    if prompts.suffix.lower() in TEXTS:
        prompts = _as_jsonl(prompts, scratch / "prompts.jsonl")

    def made(prompt: Mapping[str, str]) -> Job:
        sections: dict[str, Any] = {
            "name": "prompts",
            "model": {"path": model},
            "input": {"path": str(prompts.absolute())},
            "prompt": prompt,
            "output": {"path": str(scratch.absolute() / "results")},
        }
        return load_job(sections, overrides)

    job = made({"text": "text"})
    return made(_prompt(_columns(job, prompts), job))


def _prompt(columns: list[str], job: Job) -> dict[str, str]:
    found = next((name for name in COLUMNS if name in columns), None)
    if found is None:
        raise UsageError(
            f"--prompts: the file has the columns {', '.join(columns)}; wanted one of {', '.join(COLUMNS)}"
        )
    if found == "messages":
        return {"messages": found}
    templated = found == "prompt" and Tokenizer.load(job.model.path).chat_template is not None
    return {"user": "{{ prompt }}"} if templated else {"text": found}


def _columns(job: Job, prompts: Path) -> list[str]:
    for batch in open_input(job, input_files(job)).batches():
        for row in batch.rows:
            if not isinstance(row, RowError):
                return [*row]
    raise UsageError(f"--prompts {prompts}: the file has no row that can be read")


def _as_jsonl(prompts: Path, to: Path) -> Path:
    try:
        with to.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": line}) + "\n" for line in _lines(prompts))
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompts {prompts}: not a text in UTF-8 ({error}); convert it") from error
    return to


def _lines(prompts: Path) -> Iterator[str]:
    with prompts.open(encoding="utf-8") as file:
        yield from (text for line in file if (text := line.rstrip("\r\n")).strip())
