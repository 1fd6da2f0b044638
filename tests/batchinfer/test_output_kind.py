"""Tests that a kind of answers is one object and one line of the registry.

The kind here is made up: the number of prompt tokens per token of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from batchinfer.core.errors import JobFileError, UsageError
from batchinfer.core.request import Completion, Output, Request, RowError
from batchinfer.filesystem.location import Location
from batchinfer.store.answers.cleaning import RetentionRule, clean_store
from batchinfer.store.answers.completion_store import read_records
from batchinfer.store.answers.parts import COMPLETION_SCHEMA
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.columns.schema_columns import SchemaColumns
from batchinfer.store.index.requested import RequestedOutputs
from batchinfer.store.outputs.frame import Frame, frame_schema
from batchinfer.store.outputs.kind import OutputKind, TokenBytes
from batchinfer.store.outputs.registry import KINDS
from batchinfer.store.results.diff import DiffOptions, diff_results
from batchinfer.store.results.verify import verify_result, verify_store
from tests.batchinfer.pipeline.test_pipeline import FAKE, NO_ENGINE, people, run, table, write_job
from tests.batchinfer.test_to_openai import batch, bodies, chat, to

FIELD = pa.field("ratio", pa.float64())


@dataclass(frozen=True)
class Ratio:
    """The number of prompt tokens per token of the answer."""

    value: float
    held_bytes = 0


class Divide:
    """Turns texts into ratios. An answer of seven tokens is an error."""

    def __init__(self) -> None:
        self._prompts: dict[bytes, int] = {}

    def expect(self, requests: Iterable[Request]) -> None:
        self._prompts |= {request.key: len(request.prompt) for request in requests}

    def receive(self, completions: Sequence[Completion]) -> list[Completion]:
        return [self._received(completion) for completion in completions]

    def _received(self, completion: Completion) -> Completion:
        if completion.error is not None:
            return replace(completion, output=None)
        prompt, count = self._prompts.pop(completion.key), len(completion.tokens.token_ids)
        if count == 7:
            return replace(completion, output=None, error=RowError("seven", "policy", "seven tokens"))
        return replace(completion, output=Ratio(prompt / count))


class RatioKind(OutputKind):
    name, version, output, answer = "ratio", 3, Ratio, "ratio"
    aggregates: ClassVar[dict[str, str]] = {}
    stored = pa.schema([FIELD])

    def receiver(self, columns: SchemaColumns | None, detokenizer: Detokenizer) -> Divide:
        return Divide()

    def arrays(self, outputs: Sequence[Output | None]) -> dict[str, pa.Array]:
        values = [one.value if isinstance(one, Ratio) else None for one in outputs]
        return {} if values == [None] * len(values) else {FIELD.name: pa.array(values, FIELD.type)}

    def read(self, asked: RequestedOutputs) -> pa.Schema:
        return self.stored

    def batch_rows(self, asked: RequestedOutputs) -> int | None:
        return 7

    def schema(self, asked: RequestedOutputs) -> pa.Schema:
        return frame_schema(FIELD)

    def table(
        self, asked: RequestedOutputs, rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer
    ) -> pa.Table:
        frame = Frame(rows, matched)
        return frame.result_table(ratio=frame.when_answered(matched.column("ratio")))

    def entries(self, table: pa.Table) -> NDArray[np.int64]:
        return np.zeros(table.num_rows, np.int64)

    def openai_columns(self, names: Sequence[str]) -> tuple[list[str], int | None]:
        return ["ratio"], None

    def openai_body(
        self, answers: Sequence[dict[str, Any]], chat: bool, tokens: TokenBytes, encoding: str | None
    ) -> dict[str, Any]:
        return {"object": "ratio", "ratio": answers[0]["ratio"]}


@pytest.fixture
def ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the kind, and let jobs request it."""
    kind = RatioKind()
    monkeypatch.setitem(KINDS, kind.name, kind)
    monkeypatch.setattr("batchinfer.plan.setup.job_setup.kind_of", lambda job: kind)


def job(folder: Path, model: Path, rows: int, **sections: Any) -> Path:
    return write_job(folder, model, people(rows), sampling={"max_tokens": 5}, **sections)


@pytest.mark.usefixtures("ratios")
def test_a_whole_job_resumes_and_publishes(tmp_path: Path, model: Path) -> None:
    path = job(tmp_path, model, 20)
    assert run(path).exit_code == 0
    first = table(path)
    names = ["row_id", "file", "row_index", "custom_id", "status", "ratio"]
    assert list(first[0]) == [*names, "error_code", "error_class", "error_message", "retryable"]
    assert all(row["status"] == "ok" and row["ratio"] == round(row["ratio"] * 5) / 5 > 1 for row in first)
    path = job(tmp_path, model, 30, output={"path": "out/res", "columns": ["age"]})
    assert run(path).exit_code == 0
    assert [row["ratio"] for row in table(path)][:20] == [row["ratio"] for row in first]
    assert [row["age"] for row in table(path)] == list(range(30))
    assert not verify_result(Location.at(tmp_path / "out/res"))


@pytest.mark.usefixtures("ratios")
def test_its_check_makes_error_rows(tmp_path: Path, model: Path) -> None:
    path = write_job(tmp_path, model, people(3), sampling={"max_tokens": 7}, on_error={"max_error_rate": 1.0})
    run(path)
    assert {(row["status"], row["ratio"], row["error_code"]) for row in table(path)} == {
        ("error", None, "seven")
    }


@pytest.mark.usefixtures("ratios")
def test_its_lines_of_an_openai_file(tmp_path: Path, model: Path) -> None:
    path = batch(tmp_path, model, chat("a", max_tokens=5), chat("b", max_tokens=4))
    run(path, to(tmp_path / "out.jsonl", FAKE))
    found = bodies(tmp_path / "out.jsonl")
    assert [body["ratio"] for body in found] == [row["ratio"] for row in table(path)]
    assert [list(body) for body in found] == [["id", "object", "created", "model", "ratio"]] * 2


@pytest.mark.usefixtures("ratios")
def test_its_columns_are_reserved_in_its_jobs(tmp_path: Path, model: Path) -> None:
    rows = [row | {"ratio": 1} for row in people(3)]
    path = write_job(tmp_path, model, rows, output={"path": "out/res", "columns": ["ratio"]})
    with pytest.raises(JobFileError, match=r"output\.columns.*'ratio'"):
        run(path)


@pytest.mark.slow
def test_kinds_share_a_store_without_mixing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Earlier texts are read as texts, with any other answers in the store."""
    path = job(tmp_path, model, 12)
    run(path)
    texts, store = table(path), next((tmp_path / "out").rglob("completions"))
    parts = sorted(read_records(store)[0])
    assert all(pq.read_schema(part).equals(COMPLETION_SCHEMA) for part in parts)
    assert "ratio" not in texts[0], "a name that is reserved in other jobs"
    request.getfixturevalue("ratios")
    assert run(path, replace(FAKE, replace=True)).exit_code == 0
    ratios = table(path)
    assert "ratio" in ratios[0]
    assert not verify_store(store)
    with pytest.raises(UsageError, match="different kinds of answers"):
        texts_and_ratios(tmp_path, texts)
    cleaned = clean_store(store, RetentionRule(None, None))
    assert cleaned.parts_after < cleaned.parts_before
    assert run(path, NO_ENGINE).exit_code == 0
    assert table(path) == ratios
    monkeypatch.undo()
    assert run(path, replace(NO_ENGINE, replace=True)).exit_code == 0, "the texts are stored still"
    assert json.dumps(table(path)) == json.dumps(texts)


def texts_and_ratios(folder: Path, texts: list[dict[str, Any]]) -> None:
    """Compare the published ratios with a result of texts."""
    other = folder / "texts.parquet"
    pq.write_table(pa.Table.from_pylist(texts), other)
    diff_results([other], sorted((folder / "out/res").glob("*.parquet")), DiffOptions())
