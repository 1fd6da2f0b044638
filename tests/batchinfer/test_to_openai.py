"""Tests `run --to-openai FILE`: whole jobs over OpenAI batch files, and files that they may not change."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from batchinfer.core.errors import OutputConflict, StorageError, UsageError
from batchinfer.pipeline.options import RunOptions
from tests.batchinfer.pipeline.test_pipeline import FAKE, NO_ENGINE, run, table, write_job


def chat(name: str, **body: Any) -> dict[str, Any]:
    body = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": f"hello {name}"}], **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": name, **body}}


def batch(folder: Path, model: Path, *rows: Any, **sections: Any) -> Path:
    return write_job(folder, model, list(rows or [chat("a"), chat("b")]), prompt=None, **sections)


def to(path: Path, options: RunOptions = FAKE, **more: Any) -> RunOptions:
    return replace(options, to_openai=path, **more)


def bodies(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["response"]["body"] for line in path.read_text().splitlines()]


def test_every_line_names_the_model_of_its_request(tmp_path, model):
    path = batch(tmp_path, model, chat("a"), completion("b"), chat("c", model="another"))
    run(path, to(tmp_path / "out.jsonl"))
    told = [(body["object"], body["model"]) for body in bodies(tmp_path / "out.jsonl")]
    assert told == [
        ("chat.completion", "gpt-4o-mini"),
        ("text_completion", "model"),
        ("chat.completion", "another"),
    ]


def test_a_text_completion_may_begin_with_its_prompt(tmp_path, model):
    """The result has only the answer, which is not computed again. Special tokens are no text."""
    ids = [*range(60, 70), 0]
    prompts = ["Once upon\na time", "Once upon\na time", ids, ids]
    rows = [completion(str(n), prompt=prompt, temperature=0) for n, prompt in enumerate(prompts)]
    for row in rows[1::2]:
        row["body"] |= {"echo": True, "logprobs": None}
    path = batch(tmp_path, model, *rows)
    run(path, to(tmp_path / "out.jsonl"))
    texts = [body["choices"][0]["text"] for body in bodies(tmp_path / "out.jsonl")]
    assert [row["generated_text"] for row in table(path)] == [texts[0], texts[0], texts[2], texts[2]]
    rust = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert texts[1::2] == [prompts[0] + texts[0], rust.decode(ids) + texts[2]]
    assert len(rust.decode(ids)) > 5


def test_the_time_is_written_on_request(tmp_path, model):
    path = batch(tmp_path, model)
    began = int(time.time())
    run(path, to(tmp_path / "out.jsonl", openai_timestamps=True))
    assert all(began <= body["created"] <= time.time() for body in bodies(tmp_path / "out.jsonl"))
    run(path, to(tmp_path / "out.jsonl", NO_ENGINE))
    assert [body["created"] for body in bodies(tmp_path / "out.jsonl")] == [0, 0]
    with pytest.raises(UsageError, match="--to-openai FILE"):
        run(path, replace(NO_ENGINE, openai_timestamps=True))


@pytest.mark.parametrize("name", ["in.jsonl", "linked.jsonl", "job.yaml", "notes.txt", "gone/out.jsonl"])
def test_no_foreign_file_is_overwritten_and_nothing_runs(tmp_path, model, name):
    path = batch(tmp_path, model)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "linked.jsonl").hardlink_to(tmp_path / "in.jsonl")
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(OutputConflict, match="--to-openai"):
        run(path, to(tmp_path / name, NO_ENGINE))
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before  # not even a state folder


def test_a_file_among_the_inputs_is_refused(tmp_path, model):
    """Otherwise the first run would write it and the second one read it."""
    path = batch(tmp_path, model, input={"path": "*.jsonl", "format": "openai"})
    with pytest.raises(OutputConflict, match="the next run would read it"):
        run(path, to(tmp_path / "out.jsonl", NO_ENGINE))


def test_replace_is_for_files_that_are_nobodys_input(tmp_path, model):
    path = batch(tmp_path, model)
    (tmp_path / "old.jsonl").write_text("an older answer")
    run(path, to(tmp_path / "old.jsonl", replace=True))
    assert len(bodies(tmp_path / "old.jsonl")) == 2
    with pytest.raises(OutputConflict, match="an input of the job"):
        run(path, to(tmp_path / "in.jsonl", replace=True))


def test_a_folder_that_takes_no_file_is_seen_before_the_engine(tmp_path, model):
    """Root can write anywhere except for a place like /proc."""
    path = batch(tmp_path, model)
    folder = Path("/proc") if os.geteuid() == 0 else tmp_path / "locked"
    if os.geteuid():
        folder.mkdir(mode=0o500)
    with pytest.raises(StorageError, match="cannot create"):
        run(path, to(folder / "out.jsonl", NO_ENGINE))


def test_a_failed_openai_file_is_reported_and_written_by_the_next_run(tmp_path, model, monkeypatch):
    path = batch(tmp_path, model)

    def full(*_: object, **__: object) -> int:
        raise StorageError("out.jsonl: no space")

    monkeypatch.setattr("batchinfer.pipeline.stages.publishing.write_openai", full)
    with pytest.raises(StorageError, match=r"results are published in .*the same command writes it"):
        run(path, to(tmp_path / "out.jsonl"))
    assert len(table(path)) == 2
    assert not list((tmp_path / "out/.batchinfer-res/scratch").iterdir())  # no prompt is kept for it
    monkeypatch.undo()
    run(path, to(tmp_path / "out.jsonl", NO_ENGINE))
    assert len(bodies(tmp_path / "out.jsonl")) == 2


def test_an_openai_file_of_another_input_is_refused_before_the_engine(tmp_path, model):
    path = write_job(tmp_path, model, [{"text": "a"}])
    with pytest.raises(UsageError, match="no OpenAI batch file"):
        run(path, replace(NO_ENGINE, to_openai=tmp_path / "out.jsonl"))
