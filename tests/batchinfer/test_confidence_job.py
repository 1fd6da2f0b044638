"""Runs whole jobs with `output.confidence`: probabilities among the allowed tokens equal transformers'."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from batchinfer.core.errors import JobFileError
from batchinfer.job import load_job
from batchinfer.pipeline.options import RunOptions
from tests.batchinfer.pipeline.test_pipeline import NO_ENGINE, people, run, table, write_job
from tests.checkpoints import make_model_folder

REAL = RunOptions()
ROWS = 4
CHOICES = ["no", "no idea", "yes", "yellow"]
Logits = Callable[[list[int]], torch.Tensor]


class Reference:
    """Probabilities of texts under a constraint that only allows these texts, token by token."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        config = json.loads((model / "config.json").read_text())
        eos = config["eos_token_id"]
        self._eos = {eos} if isinstance(eos, int) else set(eos)
        ids = range(self._tokenizer.get_vocab_size())
        self._texts = {id: self._tokenizer.decode([id], skip_special_tokens=True) for id in ids}

    def of(self, prompt: str, texts: list[str]) -> Mapping[str, float]:
        """Return the probability of each text, over all its tokenisations."""
        found: dict[str, float] = defaultdict(float)
        pending = [("", self._tokenizer.encode(prompt).ids, 1.0)]
        while pending:
            text, ids, probability = pending.pop()
            with torch.inference_mode():
                logits = self._theirs(torch.tensor([ids])).logits[0, -1].double()
            allowed = {
                id: text + own
                for id, own in self._texts.items()
                if own and any(one.startswith(text + own) for one in texts)
            }
            ends = self._eos if text in texts else set()
            each = [*allowed, *ends]
            shares = logits[each].softmax(0).tolist()
            for id, share in zip(each, shares, strict=True):
                if id in ends:
                    found[text] += probability * share
                elif [one for one in texts if one.startswith(allowed[id])] == [allowed[id]]:
                    found[allowed[id]] += probability * share
                else:
                    pending.append((allowed[id], [*ids, id], probability * share))
        return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model_folder(folder, seed=3)
    return folder


def job(folder: Path, model: Path, output: dict[str, Any], **sampling: Any) -> Path:
    return write_job(
        folder,
        model,
        people(ROWS),
        model={"path": str(model), "dtype": "float32"},
        sampling={"max_tokens": 60, **sampling},
        prompt={"system": None, "user": None, "text": "text"},
        output={"path": "out/res", **output},
    )


@pytest.mark.slow
def test_a_choice_has_its_probability_among_all_choices(tmp_path: Path, tiny: Path) -> None:
    """The model's tokens are bytes: each text has one tokenisation, and the choices' probabilities sum to 1."""
    path = job(tmp_path, tiny, {"confidence": True}, choice=CHOICES, temperature=2.0, repetition_penalty=1.3)
    without = ("output.confidence", "false")
    run(path, REAL, without)
    plain = table(path)
    assert run(path, REAL).row["computed_requests"] == len(plain), "answers without it are other work"
    rows, reference = table(path), Reference(tiny)
    for row, given in zip(rows, people(ROWS), strict=True):
        wanted = reference.of(given["text"], CHOICES)
        assert math.isclose(sum(wanted.values()), 1, abs_tol=1e-9)
        assert math.isclose(row["confidence"], wanted[row["generated_text"]], rel_tol=1e-3), row
    assert len({row["generated_text"] for row in rows}) > 1
    assert "logprobs" not in rows[0]
    run(path, NO_ENGINE, without)
    assert table(path) == plain
    run(path, NO_ENGINE)
    assert table(path) == rows


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["order", "other", "question"]}, "who": {"$ref": "#/$defs/who"},
        "fixed": {"const": "x"}, "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2,
        "maxItems": 2}},
    "required": ["kind", "who", "fixed", "tags"],
    "additionalProperties": False,
    "$defs": {"who": {"type": "object", "properties": {"age": {"anyOf": [{"enum": [1, 12, 2]}, {"type": "null"}]}},
        "required": ["age"], "additionalProperties": False}},
}  # fmt: skip


def test_fields_have_theirs_in_a_map(tmp_path: Path, tiny: Path) -> None:
    """Each equals transformers' probability of the field's values after the text before."""
    path = job(tmp_path, tiny, {"confidence": True, "schema": SCHEMA}, max_tokens=120, temperature=1.5)
    assert run(path, REAL).exit_code == 0
    rows, reference = table(path), Reference(tiny)
    for row, given in zip(rows, people(ROWS), strict=True):
        found, text = dict(row["confidence"]), row["generated_text"]
        assert list(found) == ["kind", "who.age", "tags[0]", "tags[1]"]
        age = json.loads(text)["who"]["age"]
        cases = {
            "kind": (text.index('"kind"') + 6, ['"order"', '"other"', '"question"'], json.dumps(row["kind"])),
            "who.age": (text.index('"age"') + 5, ["1}", "12}", "2}", "null}"], json.dumps(age) + "}"),
            "tags[0]": (text.index("[") + 1, ["true", "false"], json.dumps(row["tags"][0])),
        }
        for path_of, (at, values, chosen) in cases.items():
            before = text[: text.index(chosen, at)]
            wanted = reference.of(given["text"] + before, values)[chosen]
            assert math.isclose(found[path_of], wanted, rel_tol=1e-3), (path_of, text)


@pytest.mark.parametrize(("output", "sampling", "said"), [
    ({}, {}, "lists no values"),
    ({}, {"choice": ["a", "b"], "logprobs": 2}, "does not go with sampling.logprobs"),
    ({}, {"choice": ["a", "b"], "from_columns": ["logprobs"]}, "does not go with sampling.logprobs"),
    ({}, {"choice": ["a", "b"], "from_columns": ["choice"]}, "rows have their own choice"),
    ({"columns": ["confidence"]}, {"choice": ["a", "b"]}, "a result with output.confidence"),
])  # fmt: skip
def test_options_that_exclude_confidence_are_refused(
    tmp_path: Path, tiny: Path, output: dict[str, Any], sampling: dict[str, Any], said: str
) -> None:
    with pytest.raises(JobFileError, match=said):
        load_job(job(tmp_path, tiny, {"confidence": True, **output}, **sampling))


def test_the_page_s_example_runs(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/structured.md").read_text("utf-8")
    section = page[page.index("\n## Confidence\n") :]
    blocks = dict(re.findall(r"```(yaml|sql)\n(.*?)```", section, re.DOTALL)[:2])
    (tmp_path / "job.yaml").write_text(blocks["yaml"])
    (tmp_path / "reviews.jsonl").write_text(
        '{"id": "a", "body": "Where is it?"}\n{"id": "b", "body": "Thanks"}\n'
    )
    sets = (("model.path", str(tiny)), ("prompt.chat", "false"), ("sampling.max_tokens", "60"))
    assert run(tmp_path / "job.yaml", REAL, *sets).exit_code == 0
    monkeypatch.chdir(tmp_path)
    for _, kind, share in duckdb.sql(blocks["sql"]).fetchall():
        assert kind in ("order", "question", "complaint")
        assert 0 < share <= 0.9
    count = "SELECT count(*) FROM 'results/triage/*.parquet' WHERE cardinality(confidence) = 2"
    assert duckdb.sql(count).fetchall() == [(2,)]
