"""Runs whole jobs with `task: score` and `task: classify`, and compares them with transformers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchinfer.core.errors import BatchInferError, JobFileError
from batchinfer.job import load_job
from batchinfer.plan.forecast.job import forecast_job
from batchinfer.report.summary import summary
from batchinfer.verbs.query import open_answer
from tests.batchinfer.killed_runs import DETERMINISTIC, REAL, killed_and_whole, published
from tests.batchinfer.pipeline.test_pipeline import FAKE, NO_ENGINE, run, table
from tests.batchinfer.pipeline.test_pipeline import write_job as write_any
from tests.batchinfer.wrong_jobs import FAKE as FAKE_ENGINE
from tests.batchinfer.wrong_jobs import CliOf, Place
from tests.checkpoints import make_model_folder

LABELS = [" yes", " no", " not at all", " no way", "!"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scores") / "model"
    make_model_folder(folder, "qwen3")
    return folder


def write_job(folder: Path, checkpoint: Path, rows: list[Any] | None, task: str, **sections: Any) -> Path:
    usual = {
        "sampling": None,
        "engine": {"device": "cpu"},
        "on_error": {"max_error_rate": 0.7},
        "prompt": None,
    }
    prompt = sections.pop("prompt", {"text": "text"})
    path = write_any(folder, checkpoint, rows, task=task, **{**usual, **sections})
    path.write_text(json.dumps(json.loads(path.read_text()) | {"prompt": prompt}))
    return path


class Reference:
    """Scores of transformers for a text after another one."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def logprobs(self, before: str, text: str) -> tuple[list[float], bool]:
        context, whole = self.encode(before), self.encode(before + text)
        shared = len(context) if before else 1
        assert whole[:shared] == (context or whole[:1])
        with torch.no_grad():
            logits = self.model(torch.tensor([whole])).logits[0, shared - 1 : -1]
        targets = whole[shared:]
        found = logits.log_softmax(-1)[range(len(targets)), targets].tolist()
        return found, logits.argmax(-1).tolist() == targets


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def rows_of(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"r{n}",
            "text": f"A question that all share, and number {n // 2}:",
            "answer": f" {n % 3} or so",
        }
        for n in range(count)
    ]


def check_flops(path: Path, row: Mapping[str, Any]) -> None:
    """Check that FLOPs of requests and of buckets add up to the run's, with the head for scored positions."""
    with open_answer(path.parent / "out/res", "SELECT sum(flops) FROM requests", partial=False) as requests:
        assert requests.fetchall() == [(row["flops"],)]
    with open_answer(path.parent / "out/res", "SELECT sum(flops) FROM buckets", partial=False) as buckets:
        assert buckets.fetchall() == [(row["flops"],)]


def test_scores_equal_transformers(tmp_path: Path, checkpoint: Path, reference: Reference) -> None:
    rows = [*rows_of(12), rows_of(1)[0]]
    bad = [{"id": "b0", "text": "x", "answer": None}, {"id": "b1", "text": "x", "answer": ""}]
    bad += [{"id": "b2", "text": "x", "answer": 3}, {"id": "b3", "text": None, "answer": "x"}]
    special = {"id": "s", "text": "What ends a turn?", "answer": " <|im_end|> does"}
    score = {"continuation": "answer", "per_token": True}
    path = write_job(tmp_path, checkpoint, [*rows, special, *bad], "score", score=score)
    outcome = run(path, REAL)
    assert outcome.exit_code == 0
    found = table(path)
    for row, got in zip(rows, found, strict=False):
        logprobs, greedy = reference.logprobs(row["text"], row["answer"])
        assert got["status"] == "ok"
        assert got["logprob"] == pytest.approx(sum(logprobs), abs=1e-4)
        np.testing.assert_allclose(got["token_logprobs"], logprobs, atol=1e-4)
        assert (got["is_greedy"], got["scored_tokens"]) == (greedy, len(logprobs))
        assert got["prompt_tokens"] == len(reference.encode(row["text"]))
    assert found[len(rows)]["scored_tokens"] > len(" <> does"), "a row's special token is read as text"
    codes = ["continuation_missing", "empty_continuation", "continuation_type", "prompt_missing"]
    assert [row["error_code"] for row in found[-4:]] == codes
    assert found[-1]["logprob"] is found[-1]["is_greedy"] is found[-1]["token_logprobs"] is None
    row = outcome.row
    assert (row["computed_requests"], row["duplicate_rows"]) == (13, 1)
    meaningless = (
        "output_tokens",
        "sampled_tokens",
        "output_tokens_per_s",
        "ttft_p50_s",
        "forecast_output_tokens",
    )
    assert {row[name] for name in meaningless} == {None}
    assert row["scored_tokens"] == sum(one["scored_tokens"] or 0 for one in found)
    wanted = sum(one["logprob"] or 0 for one in found) / row["scored_tokens"]
    assert row["mean_logprob"] == pytest.approx(wanted)
    check_flops(path, row)


def test_a_text_is_scored_whole(tmp_path: Path, checkpoint: Path, reference: Reference) -> None:
    texts = [f"Text {n} of some length" for n in range(5)]
    rows = [{"id": f"r{n}", "text": text} for n, text in enumerate([*texts, "x"])]
    path = write_job(tmp_path, checkpoint, rows, "score")
    planned = forecast_job(load_job(path), lambda _: None, lambda _: None)
    assert planned.forecast is not None
    assert (planned.plan.shared_prefix_tokens, planned.forecast.run.output_tokens) == (0, 0)
    outcome = run(path, REAL)
    assert (outcome.exit_code, outcome.row["prefix_saved_tokens"]) == (0, None)
    check_flops(path, outcome.row)
    found = table(path)
    for text, got in zip(texts, found, strict=False):
        assert got["logprob"] == pytest.approx(sum(reference.logprobs("", text)[0]), abs=1e-4)
        assert (got["prompt_tokens"], got["scored_tokens"]) == (1, len(reference.encode(text)) - 1)
    assert found[-1]["error_code"] == "empty_continuation"
    assert "token_logprobs" not in found[0]


def test_rows_have_labels_of_their_own(tmp_path: Path, checkpoint: Path, reference: Reference) -> None:
    """With any number of labels. A second run, with known rows, gives equal results."""
    rows: list[dict[str, Any]] = [
        row | {"labels": LABELS[n % 3 : n % 3 + 2 + n % 2]} for n, row in enumerate(rows_of(7))
    ]
    rows[3]["labels"] = ["one </s>"]
    wrong: list[Any] = [None, [], ["a", "a"], ["a", 3], "a"]
    rows += [{"id": f"w{n}", "text": "x", "labels": labels} for n, labels in enumerate(wrong)]
    path = write_job(tmp_path, checkpoint, rows, "classify", classify={"choices_from_column": "labels"})
    assert run(path, REAL).exit_code == 0
    found = table(path)
    for row, got in zip(rows[:7], found, strict=False):
        assert [label for label, _ in got["probabilities"]] == row["labels"]
        each = [
            sum(reference.logprobs(str(row["text"]), label)[0])
            for label in row["labels"]
            if "</s>" not in label
        ]
        if each:
            wanted = np.exp(np.array(each) - max(each))
            wanted /= wanted.sum()
            np.testing.assert_allclose([one for _, one in got["probabilities"]], wanted, atol=1e-4)
            assert got["label"] == row["labels"][int(wanted.argmax())]
    assert found[3]["probability"] == 1
    assert [row["error_code"] for row in found[7:]] == ["labels_missing", *["labels_type"] * 4]
    write_job(tmp_path, checkpoint, rows[::-1], "classify", classify={"choices_from_column": "labels"})
    assert run(path, NO_ENGINE).exit_code == 0
    same = ("label", "probability", "probabilities", "error_code")
    again = [[row[name] for name in same] for row in table(path)]
    assert again[::-1] == [[row[name] for name in same] for row in found]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run has two engines, another an engine with small steps that dies; then a run with known rows."""
    places, rows = [tmp_path / name for name in ("whole", "killed")], rows_of(40)
    classify = {"choices": LABELS, "calibrate": True}
    jobs = []
    for place in places:
        place.mkdir()
        jobs.append(write_job(place, checkpoint, rows, "classify", classify=classify, engine=DETERMINISTIC))
    whole, killed = jobs
    outcome, resumed = killed_and_whole(*jobs, monkeypatch, ("engine.max_num_batched_tokens", "24"))
    assert outcome.row["computed_requests"] == 20
    assert resumed.row["computed_requests"] < 20
    normalized = classify | {"length_normalized": True}
    write_job(places[0], checkpoint, rows, "classify", classify=normalized, engine=DETERMINISTIC)
    assert run(whole, NO_ENGINE).exit_code == 0, "columns made from scores compute nothing"
    assert published(whole) != published(killed)


def fenced(section: str, language: str, which: int = 0) -> str:
    page = (Path(__file__).parents[2] / "docs/scores.md").read_text("utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(found[which])


@pytest.mark.slow
def test_the_jobs_of_the_page_run(tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/qwen3-4b").symlink_to(checkpoint)
    monkeypatch.chdir(tmp_path)
    for section, rows in (("Labels", "reviews.jsonl"), ("Scores", "pairs.jsonl")):
        (tmp_path / "job.yaml").write_text(fenced(section, "yaml"))
        (tmp_path / rows).write_text(fenced(section, "json"))
        assert run(tmp_path / "job.yaml", REAL).exit_code == 0
    found = duckdb.sql(fenced("Labels", "sql")).fetchall()
    assert {row[0] for row in found} == {"r1", "r2", "r3"}
    assert all(row[1] in ("positive", "negative", "mixed") and 0 < row[3] <= 1 for row in found)
    (tmp_path / "job.yaml").write_text(fenced("Labels", "yaml", 1))
    assert run(tmp_path / "job.yaml", REAL).exit_code == 0
    calibrated = duckdb.sql("SELECT custom_id, label FROM 'results/calibrated/*.parquet'").fetchall()
    assert {row[0] for row in calibrated} == {"r1", "r2", "r3"}
    perplexity = "SELECT exp(-sum(logprob) / sum(scored_tokens)) FROM 'results/answers/*.parquet'"
    ((value,),) = duckdb.sql(perplexity).fetchall()
    assert value > 1


def test_a_preview_marks_the_text_after_the_prompt(place: Place, cli_of: CliOf) -> None:
    place.rows({"id": "r0", "text": "word 0", "more": " and a"})
    verbs = cli_of(FAKE_ENGINE)

    def previewed(lines: str) -> tuple[str, dict[str, Any]]:
        job = place.job(lines, prompt="prompt: {text: text}", sampling="")
        shown, as_json = verbs("preview", job), verbs("preview", job, "--json")
        assert (shown.code, as_json.code) == (0, 0), shown.err
        return shown.out, json.loads(as_json.out)

    text, row = previewed('task: classify\nclassify: {choices: [" a", " bb\\n"]}')
    prompt, ids, *labels = text.splitlines()[3:7]
    assert "a label" in text
    assert (row["text"], prompt) == ("word 0", "word 0")
    assert ids == f"{len(row['token_ids'])} tokens: {' '.join(map(str, row['token_ids']))}"
    assert [one["text"] for one in row["continuations"]] == [" a", " bb\n"]
    assert [line.rpartition(", ")[0] for line in labels] == [
        'continuation 1 of 2: " a"', 'continuation 2 of 2: " bb\\n"'
    ]  # fmt: skip
    text, row = previewed(f"task: classify\nclassify: {{choices: {[f'label {n}' for n in range(30)]}}}")
    assert "continuation 10 of 30" in text
    assert "continuation 11 of 30" not in text
    text, row = previewed("task: score\nscore: {continuation: more}")
    assert (row["text"], [one["text"] for one in row["continuations"]]) == ("word 0", [" and a"])
    text, row = previewed("task: score")
    assert (row["text"], row["continuations"]) == ("word 0", None)
    assert "continuation" not in text


@pytest.mark.slow
def test_every_verb_knows_labels(place: Place, cli_of: CliOf) -> None:
    place.rows(*({"id": f"r{n}", "text": f"word {n // 2}", "label": n} for n in range(12)))
    lines = "task: classify\nclassify: {choices: [a, b, c]}"
    clash = "output: {path: out/res, columns: [label]}"
    verbs = cli_of(FAKE_ENGINE)
    assert (
        "that a result of task: classify has" in verbs("run", place.job(lines, sampling="", output=clash)).err
    )
    job = place.job(lines, prompt="prompt: {text: text}", sampling="")
    planned = verbs("plan", job)
    assert (planned.code, "without a token of output" in planned.out) == (0, True)
    assert verbs("run", job).code == 0
    rows = place.table()
    assert [row["label"] for row in rows] == ["a"] * 12, "the fake engine finds low ids likely"
    assert all(sum(one for _, one in row["probabilities"]) == pytest.approx(1) for row in rows)
    shown = verbs("report", place.results)
    assert shown.code == 0
    checked = verbs("verify", place.results)
    assert checked.code == 0, checked.err + checked.out
    query = "SELECT probabilities['b'] AS b FROM results LIMIT 1"
    assert json.loads(verbs("query", place.results, query, "--json").out)["b"] < 0.5


@pytest.mark.sample(1)
@pytest.mark.parametrize("side", ["left", "right"])
def test_only_prompts_are_truncated(
    tmp_path: Path, checkpoint: Path, reference: Reference, side: str
) -> None:
    """A row with the maximum number of tokens is not truncated, and scored tokens never are."""
    rows = [
        {"id": "fits", "text": "a" * 12, "answer": "b" * 9},
        {"id": "cut", "text": "ab" * 20, "answer": "c" * 7},
    ]
    rows.append({"id": "long", "text": "aa", "answer": "b" * 21})
    model, score = {"path": str(checkpoint), "max_model_len": 20}, {"continuation": "answer"}
    prompt = {"text": "text", "truncate": side}
    path = write_job(tmp_path, checkpoint, rows, "score", score=score, model=model, prompt=prompt)
    assert run(path, REAL).exit_code == 0
    fits, truncated, long = table(path)
    assert fits["logprob"] == pytest.approx(sum(reference.logprobs("a" * 12, "b" * 9)[0]), abs=1e-4)
    kept = ("ab" * 20)[-14:] if side == "left" else ("ab" * 20)[:14]
    assert truncated["logprob"] == pytest.approx(sum(reference.logprobs(kept, "c" * 7)[0]), abs=1e-4)
    assert (truncated["prompt_tokens"], long["error_code"]) == (14, "prompt_too_long")


def probabilities(row: dict[str, Any]) -> list[float]:
    return [one for _, one in row["probabilities"]]


@pytest.mark.sample(1)
@pytest.mark.parametrize("normalized", [False, True])
def test_labels_equal_brute_force_also_when_calibrated(
    tmp_path: Path, checkpoint: Path, reference: Reference, normalized: bool
) -> None:
    """Computed scores are reused, also by a row that equals the prompt without content."""

    def written(rows: list[dict[str, Any]], **more: Any) -> Path:
        prompt = {"user": f"{'A long text. ' * 9}Rate {{{{ text }}}} by {{{{ id }}}}:", "chat": False}
        classify = {"choices": LABELS, "length_normalized": normalized, **more}
        return write_job(tmp_path, checkpoint, rows, "classify", prompt=prompt, classify=classify)

    def scores(text: str, name: str) -> NDArray[np.float64]:
        prompt = f"{'A long text. ' * 9}Rate {text} by {name}:"
        each = [reference.logprobs(prompt, label)[0] for label in LABELS]
        return np.array([sum(one) / (len(one) if normalized else 1) for one in each])

    rows = [*rows_of(6), {"id": "bad", "text": None}]
    path = written(rows)
    outcome = run(path, REAL)
    plain, prior, differ = table(path), scores("none", "none"), 0
    # A prompt runs once for all labels: the prompts with their shared prefix, and the labels' trie
    prompts = [
        reference.encode(f"{'A long text. ' * 9}Rate {row['text']} by {row['id']}:") for row in rows[:6]
    ]
    nodes = {tuple(ids[:end]) for ids in prompts for end in range(1, len(ids) + 1)}
    trie = {tuple(ids[:end]) for ids in map(reference.encode, LABELS) for end in range(1, len(ids))}
    assert outcome.row["prompt_tokens_run"] == len(nodes) + len(prompts) * len(trie)

    outcome = run(written(rows, calibrate="none"), REAL)
    assert (outcome.exit_code, outcome.row["rows"]) == (0, len(rows))
    counts = ("computed_requests", "distinct_requests", "reused_requests", "duplicate_saved_tokens")
    assert [outcome.row[name] for name in counts] == [0, 6, 6, 0], "the prompt without content is no row"
    found = table(path)
    labels = Counter(row["label"] for row in found if row["label"] is not None)
    assert outcome.row["labels"] == labels
    assert f"{labels.most_common(1)[0][0].strip()} {labels.most_common(1)[0][1]}" in summary(outcome.row)
    for row, before, after in zip(rows[:6], plain, found, strict=False):
        logits = scores(str(row["text"]), str(row["id"]))
        for got, wanted in ((before, logits), (after, logits - prior)):
            wanted = np.exp(wanted - wanted.max())
            wanted /= wanted.sum()
            assert [label for label, _ in got["probabilities"]] == LABELS
            np.testing.assert_allclose(probabilities(got), wanted, atol=1e-4)
            assert got["label"] == LABELS[int(wanted.argmax())]
            assert got["probability"] == pytest.approx(wanted.max(), abs=1e-4)
        differ += before["label"] != after["label"]
    assert differ, "else nothing is shown"
    for got in (plain[-1], found[-1]):
        assert (got["label"], got["probability"], got["probabilities"]) == (None, None, None)

    again = run(written([*rows, {"id": "none", "text": "none"}], calibrate="none"), NO_ENGINE)
    assert (again.exit_code, again.row["rows"], again.row["distinct_requests"]) == (0, len(rows) + 1, 7)
    assert table(path)[: len(rows)] == found
    assert probabilities(table(path)[-1]) == pytest.approx([1 / len(LABELS)] * len(LABELS))


@pytest.mark.slow
def test_a_prompt_without_content_that_failed_is_tried_again(
    tmp_path: Path, checkpoint: Path, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has its error and, in a later part, its answer, which counts. Until then, finished rows have
    no labels."""
    classify = {"choices": LABELS, "calibrate": True}
    sections: dict[str, Any] = {"classify": classify, "on_error": {"max_error_rate": 1}}
    path = write_job(tmp_path, checkpoint, rows_of(4), "classify", **sections)
    monkeypatch.setenv("FAKE_ENGINE_FAILS_EVERY", "1")
    with pytest.raises(BatchInferError, match=r"without content .* is an error, fake_failure"):
        run(path)
    shown = cli_of(FAKE_ENGINE)("query", tmp_path / "out/res", "FROM results", "--partial")
    assert shown.code != 0
    assert "without content (classify.calibrate) is an error" in shown.err
    monkeypatch.delenv("FAKE_ENGINE_FAILS_EVERY")
    mended = run(path, replace(FAKE, retry_errors=True))
    assert (mended.exit_code, mended.row["rows_error"]) == (0, 0)


@pytest.mark.parametrize(("template", "message"), [
    ("{{ text.strip(3) }}", "no prompt can be made with 'N/A' for all values"),
    ("{{ row.text }}", "the template reads row"),
])  # fmt: skip
def test_a_prompt_without_content_has_to_render(
    tmp_path: Path, checkpoint: Path, template: str, message: str
) -> None:
    classify = {"choices": LABELS, "calibrate": True}
    prompt = {"user": template, "chat": False}
    path = write_job(tmp_path, checkpoint, rows_of(3), "classify", classify=classify, prompt=prompt)
    with pytest.raises(JobFileError, match=message):
        run(path, NO_ENGINE)
