"""Runs whole jobs of OpenAI requests for chats, texts and vectors, mixed in one file."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchinfer.core.errors import JobFileError
from batchinfer.core.request import Completion, Request, RowError
from batchinfer.core.sampling import SamplingParams
from batchinfer.store.results.reuse.draft_answers import DraftRequests
from tests.batchinfer.costed_engine import COSTED, known_peaks
from tests.batchinfer.killed_runs import DETERMINISTIC, REAL, killed_and_whole
from tests.batchinfer.pipeline.test_pipeline import FAKE, NO_ENGINE, run, table
from tests.batchinfer.pipeline.test_pipeline import write_job as write_any
from tests.batchinfer.wrong_jobs import FAKE as FAKE_ENGINE
from tests.batchinfer.wrong_jobs import CliOf, Place
from tests.fake_engine import FakeEngine
from tests.sentence_checkpoints import make_sentence_model, reference

CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentences") / "model"
    make_sentence_model(folder)
    return folder


def chat(text: str, **more: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return CHAT, {"messages": messages, "max_tokens": 4, "temperature": 0, **more}


def text(prompt: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": prompt, "max_tokens": 4, "temperature": 0, **more}


def vectors(given: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return VECTORS, {"input": given, **more}


def write_job(folder: Path, checkpoint: Path, requests: list[tuple[str, Any]], **sections: Any) -> Path:
    rows = [
        {"custom_id": f"c{at}", "method": "POST", "url": url, "body": body}
        for at, (url, body) in enumerate(requests)
    ]
    usual = {
        "sampling": None,
        "prompt": None,
        "on_error": {"max_error_rate": 1.0},
        "engine": {"device": "cpu"},
    }
    return write_any(folder, checkpoint, rows, **{**usual, **sections})


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().removesuffix("\n").split("\n")]


def body_of(line: Any) -> Any:
    assert line["error"] is None, line
    return line["response"]["body"]


def test_one_file_mixes_chats_texts_and_vectors(tmp_path: Path, sentences: Path) -> None:
    """Each line has its endpoint's body."""
    requests = [
        chat("hello"),
        vectors(["one", "two and more", "one"], model="m", user="u"),
        text("hello"),
        vectors("one", dimensions=8, encoding_format="base64"),
        vectors([[1, 2], [3]], encoding_format="float"),
        vectors([1, 2]),
        text("hello", logprobs=1),
        vectors("two and more", input_type="query"),
    ]
    path = write_job(tmp_path, sentences, requests)
    out = tmp_path / "out.jsonl"
    outcome = run(path, replace(REAL, to_openai=out))
    assert outcome.exit_code == 0
    bodies = [body_of(line) for line in lines_of(out)]
    texts = ["chat.completion", "list", "text_completion", "list", "list", "list", "text_completion", "list"]
    assert [one["object"] for one in bodies] == texts
    several = bodies[1]
    assert [one["index"] for one in several["data"]] == [0, 1, 2]
    assert {one["object"] for one in several["data"]} == {"embedding"}
    assert (several["model"], bodies[3]["model"]) == ("m", "model")
    assert several["usage"] == {"prompt_tokens": 4 + 13 + 4, "total_tokens": 21}
    wanted = reference(sentences, ["one", "two and more", "find: two and more"]).numpy()
    found = [one["embedding"] for one in several["data"]]
    np.testing.assert_allclose(found, wanted[[0, 1, 0]], atol=1e-4)
    np.testing.assert_allclose(bodies[7]["data"][0]["embedding"], wanted[2], atol=1e-4)
    short = np.frombuffer(b64decode(bodies[3]["data"][0]["embedding"]), "<f4")
    shortened = np.array(found[0][:8])
    np.testing.assert_allclose(short, shortened / np.linalg.norm(shortened), atol=1e-6)
    assert bodies[4]["data"][0]["embedding"] == bodies[5]["data"][0]["embedding"]
    assert outcome.row["computed_requests"] == 8, (
        "a chat, two texts, of vectors three texts and two lists of ids"
    )


def test_the_job_of_the_page_runs(tmp_path: Path, sentences: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs/tasks.md"
    part = page.read_text("utf-8").partition("## OpenAI's lines")[2]
    job, lines = (str(re.findall(rf"```{kind}\n(.*?)```", part, re.DOTALL)[0]) for kind in ("yaml", "jsonl"))
    (tmp_path / "models").mkdir()
    (tmp_path / "models/qwen3-0.6b").symlink_to(sentences)
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "requests.jsonl").write_text(lines)
    assert run(tmp_path / "job.yaml", FAKE).exit_code == 0
    page = page.with_name("output.md")
    (query,) = re.findall(r"```sql\n(-- each vector.*?)```", page.read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    assert [row[:2] for row in duckdb.sql(query).fetchall()] == [("v1", 0), ("v1", 1)]


def test_columns_of_texts_and_vectors(tmp_path: Path, sentences: Path) -> None:
    """A row has the columns of its request; without their own `dimensions`, vectors have a fixed length."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    requests = [chat("hello", max_tokens=40), vectors(["one", "two"]), vectors("")]
    path = write_job(tmp_path, sentences, requests, output={"schema": schema})
    assert run(path, FAKE).exit_code == 0
    (file,) = (tmp_path / "out/res").glob("*.parquet")
    assert pq.read_schema(file).field("embedding").type == pa.list_(pa.float32(), 48)
    rows = table(path)
    shown = [(row["row_id"], row["sample_index"], row["status"], row["embedding"] is None) for row in rows]
    assert shown[1:] == [(1, 0, "ok", False), (1, 1, "ok", False), (2, 0, "ok", False)]
    assert (rows[0]["sample_index"], rows[0]["embedding"]) == (0, None)
    for name in ("generated_text", "finish_reason", "completion_tokens", "a"):
        assert [row[name] for row in rows[1:]] == [None] * 3, name
    write_job(tmp_path, sentences, [*requests, vectors("one", dimensions=3)], output={"schema": schema})
    assert run(path, NO_ENGINE).exit_code == 0
    (file,) = (tmp_path / "out/res").glob("*.parquet")
    assert pq.read_schema(file).field("embedding").type == pa.list_(pa.float32())
    assert [len(row["embedding"] or ()) for row in table(path)] == [0, 48, 48, 48, 3]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "m"}, "prompt_missing", "input is null"),
    ({"input": 3}, "prompt_type", "or a list of these, not a number"),
    ({"input": ["one", 3]}, "prompt_type", "input[1] is a number"),
    ({"input": ["one", [3]]}, "prompt_type", "input[1] is a list"),
    ({"input": []}, "empty_prompt", "no tokens"),
    ({"input": [[1], []]}, "empty_prompt", "no tokens"),
    ({"input": ["one", "a" * 600]}, "prompt_too_long", "601 tokens"),
    ({"input": ["a" * 600, "nowhere else"]}, "prompt_too_long", "601 tokens"),
    ({"input": [[1, 2], [3, 100_000]]}, "token_id_out_of_range", "token id 100000"),
    ({"input": ["a"] * 2049}, "n_over_limit", "2,049 texts; a request may have 2,048"),
    ({"input": "a", "dimensions": 49}, "bad_parameter", "from 1 to 48"),
    ({"input": "a", "dimensions": 0}, "bad_parameter", "from 1 to 48"),
    ({"input": "a", "dimensions": True}, "bad_parameter", "from 1 to 48"),
    ({"input": "a", "encoding_format": "int8"}, "bad_parameter", "float or base64"),
    ({"input": "a", "input_type": "passage"}, "bad_parameter", "query, document, none"),
    ({"input": "a", "add_special_tokens": 1}, "bad_parameter", "true or false"),
    ({"input": "a", "normalize": False}, "unknown_field", "body.normalize"),
    ({"input": "a", "temperature": 0}, "unknown_field", "body.temperature"),
    ({"input": "a", "n": 2}, "unknown_field", "body.n"),
]


def test_a_wrong_input_fails_its_line(tmp_path: Path, sentences: Path) -> None:
    wrong = [(VECTORS, body) for body, _, _ in WRONG]
    path = write_job(tmp_path, sentences, [vectors(["one", "two"]), *wrong, text("hello")])
    out = tmp_path / "out.jsonl"
    outcome = run(path, replace(FAKE, to_openai=out))
    assert outcome.exit_code == 0
    first, *bad, last = lines_of(out)
    for line, (body, code, said) in zip(bad, WRONG, strict=True):
        assert (line["response"], line["error"]["code"]) == (None, code), str(body)[:100]
        assert said in line["error"]["message"]
    assert len(body_of(first)["data"]) == 2
    assert body_of(last)["object"] == "text_completion"
    assert [row["error_code"] for row in table(path)] == [None, None, *(code for _, code, _ in WRONG), None]
    assert outcome.row["computed_requests"] == 3, "nothing of a line with an error is computed"


_COMPLETE = FakeEngine._complete


def _none_of_seven(engine: FakeEngine, request: Request) -> Completion:
    """Answer as usual, except for a prompt of the token 7 only."""
    if request.prompt.tolist() == [7]:
        return Completion(request.key, None, "error", RowError("nan_vector", "engine", "no numbers"))
    return _COMPLETE(engine, request)


def test_an_input_without_a_vector_fails_its_line(
    tmp_path: Path, sentences: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result has the other vectors. OpenAI's output has all vectors of a line, or none."""
    monkeypatch.setattr(FakeEngine, "_complete", _none_of_seven)
    path = write_job(tmp_path, sentences, [vectors([[1], [7], [2]]), vectors([3])])
    out = tmp_path / "out.jsonl"
    run(path, replace(FAKE, to_openai=out))
    bad, good = lines_of(out)
    assert bad["response"] is None
    assert bad["error"]["message"].startswith("input 1 of 3: ")
    assert [row["status"] for row in table(path)] == ["ok", "error", "ok", "ok"]
    assert len(body_of(good)["data"]) == 1


def mixed(rows: int) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for at in range(rows):
        prompt = f"the {'long ' * (at % 5)}text of number {at}"
        asked = [f"{prompt}, {'again ' * (at % 3)}", f"input {at // 2}", prompt]
        found += [chat(prompt), vectors(asked[: 1 + at % 3]), text(prompt, temperature=1, n=2)]
    return found


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_killed_run_ends_with_the_same_bytes(
    tmp_path: Path, sentences: Path, monkeypatch: pytest.MonkeyPatch, pooling: str
) -> None:
    """One run has two engines, another an engine with small steps that dies; then a run with known rows."""
    places = [tmp_path / name for name in ("whole", "killed")]
    shared = {"embed": {"pooling": pooling}, "engine": DETERMINISTIC}
    jobs = []
    for place in places:
        place.mkdir()
        jobs.append(write_job(place, sentences, mixed(6), **shared))
    outcome, resumed = killed_and_whole(*jobs, monkeypatch, ("engine.max_num_batched_tokens", "24"))
    assert 0 < resumed.row["computed_requests"] < outcome.row["computed_requests"]
    before = table(jobs[0])
    write_job(
        places[0], sentences, [*mixed(6), vectors(["input 0", "new"]), vectors(["new", "input 1"])], **shared
    )
    assert run(jobs[0], REAL).row["computed_requests"] == 1
    after = table(jobs[0])
    assert after[: len(before)] == before
    assert [row["sample_index"] for row in after[len(before) :]] == [0, 1, 0, 1]
    assert after[-3]["embedding"] == after[-2]["embedding"], "an input that two lines have is computed once"
    assert run(jobs[0], NO_ENGINE).exit_code == 0


@pytest.mark.slow
def test_known_rows_are_known_with_several_inputs(tmp_path: Path, sentences: Path) -> None:
    """The state that the last run kept treats a row with several inputs as such."""
    requests = [vectors(["one", "two"]), vectors("three", dimensions=5), text("hello")]
    path = write_job(tmp_path, sentences, requests)
    run(path, FAKE)
    before = table(path)
    write_job(tmp_path, sentences, [*requests, text("more")])
    assert run(path, FAKE).row["computed_requests"] == 1
    assert table(path)[:4] == before
    write_job(tmp_path, sentences, [text("hello"), *requests[:2]])
    assert run(path, NO_ENGINE).exit_code == 0
    assert [row["embedding"] for row in table(path)] == [
        before[3]["embedding"],
        *(r["embedding"] for r in before[:3]),
    ]


@pytest.mark.slow
def test_validate_and_plan_count_inputs(place: Place, cli_of: CliOf, sentences: Path) -> None:
    requests = [vectors(["one", "two", "one"]), chat("hello"), vectors("two")]
    lines = [
        {"custom_id": f"c{at}", "method": "POST", "url": url, "body": body}
        for at, (url, body) in enumerate(requests)
    ]
    place.rows(*lines)
    model = f"model: {{path: {sentences}}}"
    job = place.job(
        "embed: {dimensions: 16}",
        model=model,
        prompt="",
        sampling="",
        input="input: {path: rows.jsonl, format: openai}",
        output="output: {path: out/res}",
    )
    verbs = cli_of(FAKE_ENGINE)
    validated = verbs("validate", job)
    assert validated.code == 0, validated.err
    planned = json.loads(verbs("plan", job, "--json").out)
    assert (planned["rows"], planned["to_run"]) == (5, 3), planned
    previewed = verbs("preview", job, "--rows", "5")
    assert "hello" in previewed.out
    assert verbs("run", job).code == 0
    assert [len(row["embedding"] or ()) for row in place.table()] == [16, 16, 16, 0, 16]
    refused = verbs("validate", place.job("embed: {dimensions: 3}"))
    assert (refused.code, "embed: is given, but the job does not have task: embed" in refused.err) == (
        78,
        True,
    )


@pytest.mark.slow
def test_requests_for_vectors_report_unsupported_modules(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_sentence_model(model, "max_tokens")
    path = write_job(tmp_path, model, [text("hello"), vectors("one")])
    assert run(path, FAKE).exit_code == 0
    good, bad = table(path)
    assert good["status"] == "ok"
    assert bad["error_code"] == "bad_request"
    assert "vectors are not made here" in bad["error_message"]
    assert "max_tokens" in bad["error_message"]
    write_job(tmp_path, model, [text("hello"), vectors("one")], embed={"dimensions": 3})
    with pytest.raises(JobFileError, match=r"embed\.pooling"):
        run(path, FAKE)
    write_job(tmp_path, model, [text("hello"), vectors("one")], embed={"pooling": "last"})
    assert run(path, FAKE).exit_code == 0
    assert [row["status"] for row in table(path)] == ["ok", "ok"]


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=6)
INPUTS = st.one_of(
    TEXTS,
    st.lists(TEXTS, min_size=1, max_size=4),
    st.lists(st.integers(0, 200), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=3), min_size=1, max_size=4),
)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(
        st.one_of(TEXTS.map(text), st.builds(vectors, INPUTS, dimensions=st.sampled_from([None, 5, 48]))),
        min_size=1,
    )
)
def test_a_line_has_a_vector_of_each_input(
    tmp_path_factory: pytest.TempPathFactory, sentences: Path, asked: list[tuple[str, Any]]
) -> None:
    """In the order of the inputs. Duplicates are computed once across lines."""
    place = tmp_path_factory.mktemp("lines")
    path = write_job(place, sentences, asked)
    out = place / "out.jsonl"
    outcome = run(path, replace(FAKE, to_openai=out))
    lines, seen, rows = lines_of(out), dict[str, Any](), 0
    assert [line["custom_id"] for line in lines] == [f"c{at}" for at in range(len(asked))]
    for (url, body), line in zip(asked, lines, strict=True):
        if url == TEXT:
            rows += 1
            seen.setdefault(f"text {body['prompt']}", None)
            continue
        given = body["input"]
        inputs = given if isinstance(given, list) and isinstance(given[0], str | list) else [given]
        data = body_of(line)["data"]
        assert [one["index"] for one in data] == list(range(len(inputs)))
        rows += len(inputs)
        for one, found in zip(inputs, data, strict=True):
            size = body["dimensions"] or 48
            assert len(found["embedding"]) == size
            assert seen.setdefault(f"{size} {one!r}", found["embedding"]) == found["embedding"]
    assert len(table(path)) == rows
    assert outcome.row["computed_requests"] == len(
        {name.split(" ", 1)[1] if name[0] != "t" else name for name in seen}
    )


@pytest.mark.slow
def test_vectors_are_not_made_again(tmp_path: Path, sentences: Path) -> None:
    """A ladder is for texts: a failed vector has one attempt."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    requests = [chat("hello", max_tokens=2), vectors(["one", "two"])]
    ladder = [{"temperature": 0.5, "seed": 1}]
    path = write_job(tmp_path, sentences, requests, output={"schema": schema}, on_invalid=ladder)
    assert run(path, FAKE).exit_code == 0
    rows = table(path)
    assert [row["attempt"] for row in rows] == [2, 1, 1]
    assert [row["status"] for row in rows[1:]] == ["ok", "ok"]


@pytest.mark.slow
def test_a_draft_model_is_queried_only_for_texts(tmp_path: Path, sentences: Path) -> None:
    one = Request(bytes(32), np.array([1, 2], np.int32), SamplingParams.vector("last"))
    assert DraftRequests(b"", 100, 300).of(one) is None
    requests = [text("hello", max_tokens=12), vectors(["one", "two"]), text("more", max_tokens=12)]
    path = write_job(tmp_path, sentences, requests, drafts={"model": str(sentences), "runs": "first"})
    with known_peaks(tmp_path / "cache"):
        outcome = run(path, replace(REAL, engine=COSTED))
    assert outcome.exit_code == 0
    assert outcome.row["model_accepted"] > 0
    (tmp_path / "plain").mkdir()
    drafted = write_job(tmp_path / "plain", sentences, requests, drafts="off")
    assert run(drafted, REAL).exit_code == 0
    assert [row["generated_text"] for row in table(path)] == [row["generated_text"] for row in table(drafted)]
    found, wanted = ([row["embedding"] for row in table(one)][1:3] for one in (path, drafted))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
