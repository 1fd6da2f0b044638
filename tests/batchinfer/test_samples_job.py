"""Runs whole jobs with several answers per row (sampling.n)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.store.index.index import BestOf
from batchinfer.store.outputs.best_samples import best_samples
from tests.batchinfer.killed_runs import DETERMINISTIC, REAL, killed_and_whole
from tests.batchinfer.pipeline.test_pipeline import FAKE, NO_ENGINE, run, table, write_job
from tests.batchinfer.wrong_jobs import FAKE as FAKE_ENGINE
from tests.batchinfer.wrong_jobs import CliOf, Place

PROMPT = {"system": "Be brief.", "user": "Say {{ text }}"}


def rows_of(count: int) -> list[dict[str, Any]]:
    """Return rows, two per text."""
    return [{"id": f"r{n}", "text": f"word {n // 2}", "age": n} for n in range(count)]


def job(folder: Path, model: Path, rows: list[Any] | None, n: int, **sections: Any) -> Path:
    sampling = {"max_tokens": 4, "temperature": 1.0, "n": n} | sections.pop("sampling", {})
    usual = {"input": {"id": "id"}, "output": {"columns": ["age"]}, "prompt": PROMPT}
    return write_job(folder, model, rows, sampling=sampling, **{**usual, **sections})


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_each_row_has_its_samples(tmp_path: Path, model: Path, form: str) -> None:
    """A row without a prompt, or a greedy one, is an error in each sample."""
    rows: list[Any] = [row | {"heat": None} for row in rows_of(8)]
    rows[3]["text"], rows[6]["heat"] = None, 0.0
    sections: dict[str, Any] = {"sampling": {"from_columns": {"temperature": "heat"}}}
    source = {"path": f"in.{form}", "id": "id"}
    path = job(tmp_path, model, rows, 3, input=source, on_error={"max_error_rate": 0.5}, **sections)
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    assert run(path, REAL).exit_code == 0
    found = table(path)
    assert [(row["row_id"], row["sample_index"]) for row in found] == [(n // 3, n % 3) for n in range(24)]
    assert [(row["row_index"], row["age"]) for row in found] == [(n // 3, n // 3) for n in range(24)]
    codes = {3: "null_in_template", 6: "bad_parameter"}
    assert [row["error_code"] for row in found] == [codes.get(n // 3) for n in range(24)]
    texts = {row["generated_text"] for row in found if row["status"] == "ok"}
    assert len(texts) > 12, "samples differ, also between equal rows"
    page = (Path(__file__).parents[2] / "docs/output.md").read_text("utf-8")
    section = page.partition("## Several answers to a row")[2]
    query = re.findall(r"```sql\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)[0]
    voted = duckdb.sql(query.replace("results/samples", str(tmp_path / "out/res"))).fetchall()
    assert [row[0] for row in voted] == [*range(8)]
    assert all(1 / 3 <= row[2] <= 1 for row in voted if row[1] is not None)


def means(rows: list[dict[str, Any]]) -> dict[tuple[int, int], float]:
    return {
        (row["row_id"], row["sample_index"]): sum(one["logprob"] for one in row["logprobs"])
        / len(row["logprobs"])
        for row in rows
        if row["status"] == "ok"
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize(("n", "per_file"), [(1, 3), (2, 5), (3, 1)])
def test_the_best_of_several_are_published(tmp_path: Path, model: Path, n: int, per_file: int) -> None:
    """From the answers of a job that publishes all of them: nothing is computed. An error row is an error n
    times."""
    rows: list[Any] = rows_of(7)
    rows[3]["text"] = None
    sections: dict[str, Any] = {"on_error": {"max_error_rate": 0.5}}
    path = job(tmp_path, model, rows, n, sampling={"best_of": 4, "max_tokens": 6}, **sections)
    outcome = run(path, REAL, ("output.rows_per_file", str(per_file)))
    assert (outcome.exit_code, outcome.row["computed_requests"], outcome.row["rows"]) == (0, 24, 7 * n)
    found = table(path)
    files = [pq.read_metadata(file).num_rows for file in sorted((tmp_path / "out/res").glob("*.parquet"))]
    assert files[0] == max(per_file // n * n, n)
    assert sum(files) == len(found) == 7 * n
    every = (("sampling.n", "4"), ("sampling.logprobs", "0"))
    assert run(path, NO_ENGINE, *every).exit_code == 0
    whole = table(path)
    mean = means(whole)
    wanted = []
    for number, row in enumerate(rows):
        samples = [0, 1, 2, 3]
        if row["text"] is not None:
            samples.sort(key=lambda sample: (-mean[number, sample], sample))
        wanted += [(number, sample) for sample in sorted(samples[:n])]
    assert [(row["row_id"], row["sample_index"]) for row in found] == wanted
    by_sample = {(row["row_id"], row["sample_index"]): row for row in whole}
    assert found == [by_sample[place] for place in wanted]


def test_best_samples_are_chosen_only_by_their_own_tokens() -> None:
    """The first of equal ones. An error or a NaN probability is only chosen if nothing else is left."""
    logprobs = [[-1.0, -2.0], [-1.5], [-1.5, -1.5], None, [-9.0], [float("nan")], [-0.1], [], [-2.0]]
    status = ["ok", "ok", "ok", "error", "ok", "ok", "error", "ok", "ok"]
    matched = pa.table({"logprobs": pa.chunked_array([pa.array(logprobs, pa.list_(pa.float32()))])})
    rows = pa.table({"status": status})

    def best(samples: int, n: int) -> list[int]:
        return best_samples(BestOf(n, samples), rows, matched).nonzero()[0].tolist()

    assert best(3, 1) == [0, 4, 8]
    assert best(3, 2) == [0, 1, 4, 5, 7, 8]
    assert best(9, 4) == [0, 1, 2, 8]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_samples(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run has two engines, another an engine that dies. More samples compute only the new ones."""
    jobs = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        jobs.append(job(tmp_path / name, model, rows_of(12), 3, engine=DETERMINISTIC))
    outcome, _ = killed_and_whole(*jobs, monkeypatch, ("engine.max_num_seqs", "2"))
    assert outcome.row["computed_requests"] == 36
    whole = jobs[0]
    before = {(row["custom_id"], row["sample_index"]): row["generated_text"] for row in table(whole)}
    job(whole.parent, model, rows_of(2)[:1], 7, engine=DETERMINISTIC)
    assert run(whole, REAL).row["computed_requests"] == 1, "the samples of the equal row are taken, too"
    after = [row["generated_text"] for row in table(whole)]
    assert after[:3] == [before["r0", n] for n in range(3)]


def request(name: str, text: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    """Return a request with answers of at most four tokens."""
    prompt = (
        {"prompt": text} if url == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    )
    return {"custom_id": name, "method": "POST", "url": url, "body": {**prompt, "max_tokens": 4, **body}}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_request_with_n_has_n_choices(tmp_path: Path, model: Path) -> None:
    """The prompt counts once, and chats and text completions may be mixed."""
    asked = [request("a", "hello", n=3), request("b", "hello"), request("c", "word", "/v1/completions", n=2)]
    asked += [request("d", "hello", n=2, logprobs=True), request("e", "cold", n=2, temperature=0)]
    path = write_job(tmp_path, model, asked, prompt=None, on_error={"max_error_rate": 0.9})
    assert run(path, replace(FAKE, to_openai=tmp_path / "answers.jsonl")).exit_code == 0
    found, rows = lines(tmp_path / "answers.jsonl"), table(path)
    assert [line["custom_id"] for line in found] == [*"abcde"]
    assert [(row["row_id"], row["sample_index"]) for row in rows] == [
        *((0, n) for n in range(3)), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0)
    ]  # fmt: skip
    bodies = [line["response"]["body"] for line in found[:-1]]
    kinds = ["chat.completion", "chat.completion", "text_completion", "chat.completion"]
    assert [body["object"] for body in bodies] == kinds
    for number, body in enumerate(bodies):
        own = [row for row in rows if row["row_id"] == number]
        texts = [one["text"] if "text" in one else one["message"]["content"] for one in body["choices"]]
        assert texts == [row["generated_text"] for row in own]
        assert [one["index"] for one in body["choices"]] == [row["sample_index"] for row in own]
        assert all((one["logprobs"] is not None) == (number == 3) for one in body["choices"])
        prompt, made = own[0]["prompt_tokens"], sum(row["completion_tokens"] for row in own)
        usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        assert body["usage"] == usage
    assert (found[-1]["response"], found[-1]["error"]["code"]) == (None, "bad_parameter")
    assert "temperature is 0" in found[-1]["error"]["message"]


def test_the_next_run_computes_only_other_samples(tmp_path: Path, model: Path) -> None:
    """The job's n applies to requests without their own. Duplicates share their samples in order."""
    path = write_job(tmp_path, model, [request("a", "x", n=2), request("b", "x")], prompt=None)
    assert run(path, FAKE).row["computed_requests"] == 3
    write_job(tmp_path, model, [request("b", "x"), request("a", "x", n=3)], prompt=None)
    assert run(path, FAKE).row["computed_requests"] == 1
    rows = [request("b", "x"), request("a", "x", n=1), request("c", "y")]
    write_job(tmp_path, model, rows, prompt=None, sampling={"n": 3})
    assert run(path, FAKE).row["computed_requests"] == 3
    assert [row["sample_index"] for row in table(path)] == [0, 1, 2, 0, 0, 1, 2]


def test_a_failed_choice_is_reported_with_the_others(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_FAILS_EVERY", "2")
    path = write_job(
        tmp_path, model, [request("a", "x", n=16)], prompt=None, on_error={"max_error_rate": 1.0}
    )
    run(path, replace(FAKE, to_openai=tmp_path / "answers.jsonl"))
    (line,) = lines(tmp_path / "answers.jsonl")
    failed = [row["sample_index"] for row in table(path) if row["status"] == "error"]
    assert 0 < len(failed) < 16
    choices = line["response"]["body"]["choices"]
    assert sorted([*failed, *(choice["index"] for choice in choices)]) == [*range(16)]
    assert line["error"]["code"] == "fake_failure"
    assert line["error"]["message"].startswith(f"choice {failed[0]} of 16: ")


@pytest.mark.slow
def test_a_repeated_id_is_an_error_of_all_its_samples(tmp_path: Path, model: Path) -> None:
    rows = [row | {"id": name} for row, name in zip(rows_of(4), "baca", strict=True)]
    path = job(
        tmp_path, model, rows, 3, input={"id": "id", "unique_ids": True}, on_error={"max_error_rate": 0.5}
    )
    run(path, FAKE)
    assert [row["error_code"] for row in table(path)] == [None] * 9 + ["duplicate_custom_id"] * 3
    assert "row 1 has" in table(path)[-1]["error_message"]


@pytest.mark.slow
def test_every_verb_knows_samples(place: Place, cli_of: CliOf) -> None:
    verbs = cli_of(FAKE_ENGINE)
    path = place.job(sampling="sampling: {max_tokens: 8, temperature: 1.0, n: 4}")
    for verb in ("plan", "preview"):
        assert verbs(verb, path).code == 0
    assert "rows: all 20 can be run, to get 80 answers" in verbs("validate", path).out
    assert verbs("run", path).code == 0
    query = "SELECT count(*) AS n, count(DISTINCT row_id) AS rows FROM results"
    assert json.loads(verbs("query", place.results, query, "--json").out) == {"n": 80, "rows": 20}
    for verb in ("report", "verify", "status"):
        ended = verbs(verb, place.results)
        assert ended.code == 0, ended.err
    other = place.folder / "other"
    whole = place.job(
        sampling="sampling: {max_tokens: 3, temperature: 1.0, n: 4}", output=f"output: {{path: {other}}}"
    )
    assert verbs("run", whole).code == 0
    assert verbs("diff", place.results, place.results).code == 0
    told = verbs("diff", place.results, other, "--json")
    assert json.loads(told.out)["matched"] == 80
    assert "r0#0" in verbs("diff", place.results, other).out


def test_validate_counts_rows_and_answers_separately(place: Place, cli_of: CliOf) -> None:
    rows = [{"id": f"r{n}", "text": None if n == 2 else "word", "n": n + 1} for n in range(4)]
    place.rows(*rows)
    sampling = "sampling: {temperature: 1.0, n: 3, from_columns: [n]}"
    more = "on_error: {max_error_rate: 1}"
    path = place.job(more, prompt="prompt: {text: text}", sampling=sampling)
    told = cli_of(FAKE_ENGINE)("validate", path)
    assert told.code == 0, told.err
    assert "rows: 1 of all 4 would become error rows, to get 7 answers:\n  1 × prompt_missing" in told.out
