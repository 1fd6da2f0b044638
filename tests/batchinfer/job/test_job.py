"""Valid job files: values, defaults, variables, overrides and identity."""

from __future__ import annotations

import datetime
import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from batchinfer.core.embedding import Embedding
from batchinfer.core.errors import Mistake
from batchinfer.core.sampling import SamplingParams
from batchinfer.core.scoring import Scoring
from batchinfer.input.prompts.sampling_fields import override
from batchinfer.job import (
    EngineSection,
    InputSection,
    Job,
    ModelSection,
    PromptSection,
    SamplingSection,
    load_job,
)
from batchinfer.job.check import RESULT_COLUMNS, TASK_COLUMNS, task_columns
from batchinfer.job.field_types import SAMPLING_PARAMETERS
from batchinfer.store.outputs.labels import LabelsKind
from batchinfer.store.outputs.relevance import RelevanceKind
from batchinfer.store.outputs.scores import ScoresKind
from batchinfer.store.outputs.tokens import RESULT_SCHEMA
from batchinfer.store.outputs.vectors import VectorsKind

MINIMAL = """\
name: triage
model: {path: m}
input: {path: rows.jsonl}
prompt: {user: "{{ q }}"}
output: {path: results}
"""
REPOSITORY = Path(__file__).parents[3]


def load(folder: Path, text: str = MINIMAL, *overrides: tuple[str, str], **env: str) -> Job:
    (folder / "m").mkdir(exist_ok=True)
    (folder / "job.yaml").write_text(text)
    return load_job(folder / "job.yaml", overrides, "2026-01-02", env)


def test_omitted_options_have_their_defaults(tmp_path: Path) -> None:
    job = load(tmp_path)
    assert job.source == tmp_path / "job.yaml"
    assert job.model.path == tmp_path / "m"
    assert (job.model.dtype, job.model.quantization, job.model.max_model_len) == ("auto", "auto", None)
    assert job.input.path == str(tmp_path / "rows.jsonl")
    assert (job.input.format, job.input.limit, job.input.max_line_bytes) == ("auto", None, 2**24)
    assert job.prompt is not None
    assert (job.prompt.user, job.prompt.truncate) == ("{{ q }}", "error")
    assert job.output.path == tmp_path / "results"
    assert (job.output.columns, job.output.rows_per_file) == ((), 100_000)
    engine = job.engine.model_dump()
    assert (engine.pop("enable_prefix_caching"), engine.pop("deterministic")) == (True, False)
    assert (engine.pop("tensor_parallel_size"), engine.pop("pipeline_parallel_size")) == (1, 1)
    assert engine.pop("expert_parallel_size") == 1
    assert (engine.pop("quality_rows"), engine.pop("quality_limits")) == (32, None)
    assert set(engine.values()) == {"auto"}
    assert (job.on_error.max_error_rate, job.on_error.publish) == (0.01, False)
    assert (job.cache.path, job.cache.keep) == (None, 30)
    assert (job.commit.rows, job.commit.seconds) == ("auto", 30.0)
    assert job.sampling.params() == SamplingParams()


def test_all_options_are_read(tmp_path: Path) -> None:
    job = load(
        tmp_path,
        """\
name: all of it
model: {path: ./x/../m, dtype: bfloat16, quantization: int8, max_model_len: 4096}
input: {path: [a.jsonl, "/abs/*.parquet", ../up/**/x.jsonl], format: jsonl, id: k, unique_ids: true,
  limit: 5, max_line_bytes: 1KiB}
prompt: {system: "s {{ a }}", messages: chat, truncate: left}
sampling: {max_tokens: 9, min_tokens: 9, temperature: 1, top_p: 0.5, top_k: 3, min_p: 1, seed: -7, stop: [a, b],
  stop_token_ids: [0, 5], ignore_eos: true, repetition_penalty: 1.5, presence_penalty: -2, frequency_penalty: 2,
  repetition_stop: 64, include_stop: true, logit_bias: {50256: -100, 11: 1.5},
  allowed_token_ids: [0, 11], bad_words: [no, "No"]}
output: {path: out/r, columns: [k, b], rows_per_file: 10}
engine: {device: cpu, max_num_seqs: 1, max_num_batched_tokens: 1, block_size: 16, kv_memory: 0.5,
  enable_prefix_caching: false, threads: 2, deterministic: true, tensor_parallel_size: 2,
  pipeline_parallel_size: 3}
on_error: {max_error_rate: 1, publish: true}
on_invalid: [{temperature: 2, seed: 5}, {max_tokens: 90}]
cache: {path: shared, keep: 7}
commit: {rows: 1, seconds: 0.5}
""",
    )
    up = tmp_path.parent / "up"
    assert job.input.path == (str(tmp_path / "a.jsonl"), "/abs/*.parquet", str(up / "**/x.jsonl"))
    assert (job.input.id, job.input.limit, job.input.max_line_bytes) == ("k", 5, 1024)
    assert (job.model.path, job.model.max_model_len) == (tmp_path / "m", 4096)
    assert (job.model.quantization, job.engine.deterministic) == ("int8", True)
    assert (job.engine.tensor_parallel_size, job.engine.pipeline_parallel_size) == (2, 3)
    first = (9, 9, 1.0, 0.5, 3, 1.0, -7, ("a", "b"), (0, 5), True, 1.5, -2.0, 2.0)
    lists: dict[str, Any] = {"allowed_token_ids": (0, 11), "bad_words": ("no", "No")}
    lists["logit_bias"] = ((50256, -100.0), (11, 1.5))
    assert job.sampling.params() == SamplingParams(*first, repetition_stop=64, include_stop=True, **lists)
    assert isinstance(job.sampling.temperature, float)
    assert job.output.columns == ("k", "b")
    assert (job.engine.kv_memory, job.engine.threads, job.engine.block_size) == (0.5, 2, 16)
    assert (job.cache.path, job.cache.keep) == (tmp_path / "shared", 7)
    assert job.commit.seconds == 0.5
    assert job.on_invalid == ({"temperature": 2.0, "seed": 5}, {"max_tokens": 90})
    assert isinstance(job.on_invalid[0]["temperature"], float)


@pytest.mark.parametrize(("text", "value"), [
    ("auto", "auto"),
    ("4GiB", 4 << 30),
    ("1.5 MiB", 3 << 19),
    ("2MB", 2_000_000),
    ("1", 1.0),
    ("1.0", 1.0),
    (".25", 0.25),
    ("4294967296", 1 << 32),
])  # fmt: skip
def test_kv_memory(tmp_path: Path, text: str, value: object) -> None:
    got = load(tmp_path, MINIMAL, ("engine.kv_memory", text)).engine.kv_memory
    assert (got, type(got)) == (value, type(value))


@pytest.mark.parametrize(("text", "pairs"), [
    ("[]", ()),
    ("{}", ()),
    ("[max_tokens, stop]", (("max_tokens", "max_tokens"), ("stop", "stop"))),
    ("{temperature: my temp}", (("temperature", "my temp"),)),
])  # fmt: skip
def test_parameters_from_columns(tmp_path: Path, text: str, pairs: tuple[tuple[str, str], ...]) -> None:
    job = load(tmp_path, MINIMAL, ("sampling.from_columns", text))
    assert job.sampling.from_columns == pairs
    assert SamplingSection.model_validate(job.sampling.model_dump()) == job.sampling


def test_other_inputs_and_prompts(tmp_path: Path) -> None:
    text = MINIMAL.replace("path: rows.jsonl", 'sql: "select 1 as q", id: q')
    query, other = load(tmp_path, text), load(tmp_path, text, ("input.sql_memory", "2GiB"))
    assert (query.input.sql, query.input.path) == ("select 1 as q", None)
    assert query.identity_json() == other.identity_json(), "its memory does not change its rows"
    openai = load(
        tmp_path,
        MINIMAL.replace('prompt: {user: "{{ q }}"}\n', "").replace(
            "rows.jsonl", "rows.jsonl, format: openai, unique_ids: true"
        ),
    )
    assert openai.prompt is None
    text = load(tmp_path, MINIMAL.replace('user: "{{ q }}"', "text: q, truncate: right"))
    assert text.prompt is not None
    assert text.prompt.text == "q"


@pytest.mark.parametrize(("given", "output"), [
    ("*.jsonl", "results"),
    ("in/*.jsonl.gz", "in/out"),
    ("in/a.parquet", "in/out"),
    ("in", "out"),
    ("in/*", "in2"),
    ("in/x", "in/y"),
])  # fmt: skip
def test_outputs_that_no_input_can_meet(tmp_path: Path, given: str, output: str) -> None:
    job = load(tmp_path, MINIMAL, ("input.path", f"'{given}'"), ("output.path", output))
    assert job.output.path == tmp_path / output


def test_variables_reach_every_text(tmp_path: Path) -> None:
    text = MINIMAL.replace("path: results", "path: 'r/${date}', columns: ['${C}']").replace(
        "{{ q }}", "${C} ${{ q }} $$"
    )
    job = load(tmp_path, text + "engine: {device: '${DEVICE:-cpu}', kv_memory: '${KV}'}\n", C="c", KV="2GiB")
    assert job.output.path == tmp_path / "r/2026-01-02"
    assert job.output.columns == ("c",)
    assert job.prompt is not None
    assert job.prompt.user == "c ${{ q }} $"
    assert (job.engine.device, job.engine.kv_memory) == ("cpu", 2 << 30)


@pytest.mark.parametrize(("path", "root"), [
    ("results/tickets", "results/tickets"),
    ("results/tickets/${date}", "results/tickets"),
    ("results/tickets-${date}", "results/tickets"),
    ("results/${date}/tickets", "results/tickets"),
    ("results/${date}_tickets", "results/tickets"),
    ("results/a-${date}-b", "results/a-b"),
    ("${date}/${date}-x/.y", "x/.y"),
    ("r/${date}/../s/", "r/s"),
    ("r/2026-01-02", "r/2026-01-02"),
    ("${OUT}/${date}", "out/2026-01-02"),
    ("${date}", "triage-1"),
    ("../${date}/", "../triage-1"),
    ("/${date}", "/triage-1"),
    ("/d/$${x}/${date}", "/d/${x}"),
])  # fmt: skip
def test_the_root_of_the_results_is_their_path_without_the_date(tmp_path: Path, path: str, root: str) -> None:
    job = load(
        tmp_path, MINIMAL.replace("triage", "triage / 1"), ("output.path", f"'{path}'"), OUT="out/2026-01-02"
    )
    assert job.results_root == Path(os.path.normpath(tmp_path / root))
    written = load(
        tmp_path,
        MINIMAL.replace("triage", "triage / 1").replace("path: results", f"path: '{path}'"),
        OUT="out/2026-01-02",
    )
    assert written.results_root == job.results_root


def test_an_override_takes_the_date_with_it(tmp_path: Path) -> None:
    text = MINIMAL.replace("path: results", "path: 'r/${date}'")
    job = load(tmp_path, text, ("output.path", "plain"))
    assert job.results_root == job.output.path == tmp_path / "plain"
    trial = load(tmp_path, text).first_rows(20)
    assert (trial.output.path, trial.results_root) == (tmp_path / "r-first-20", tmp_path / "r")
    assert trial.input.limit == 20


def test_the_date_is_today_unless_given(tmp_path: Path) -> None:
    load(tmp_path, MINIMAL.replace("triage", '"${date}"'))
    days = {datetime.date.today().isoformat()}
    name = load_job(tmp_path / "job.yaml").name
    assert name in days | {datetime.date.today().isoformat()}
    assert load_job(tmp_path / "job.yaml", date="2020-02-29").name == "2020-02-29"


def test_overrides(tmp_path: Path) -> None:
    job = load(
        tmp_path,
        MINIMAL + "cache:\nengine: {threads: 3}\n",
        ("engine.max_num_seqs", "64"),
        ("engine.max_num_seqs", "65"),
        ("engine.threads", "auto"),
        ("output.columns", "[a, 'b c']"),
        ("cache.path", "c/${date}"),
        ("prompt.user", "null"),
        ("prompt.text", "q"),
        ("commit", "{rows: 7}"),
        ("input.limit", ""),
        ("model.max_model_len", "auto"),
        ("sampling.stop", '"\\n"'),
    )
    assert (job.engine.max_num_seqs, job.engine.threads) == (65, "auto")
    assert job.output.columns == ("a", "b c")
    assert job.cache.path == tmp_path / "c/2026-01-02"
    assert job.prompt is not None
    assert (job.prompt.user, job.prompt.text) == (None, "q")
    assert (job.commit.rows, job.commit.seconds) == (7, 30.0)
    assert (job.input.limit, job.model.max_model_len) == (None, None)
    assert job.sampling.params().stop == ("\n",), "one stop is a list of one"


def test_an_override_of_one_alias_leaves_the_other(tmp_path: Path) -> None:
    text = MINIMAL.replace("output: {path: results}", "output: &o {path: results}\ncache: *o")
    job = load(tmp_path, text, ("cache.path", "c"))
    assert job.output.path == tmp_path / "results"


def test_a_relative_path_of_the_job_file_counts_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    job = load_job(f"{tmp_path.name}/job.yaml")
    assert (job.source, job.model.path) == (tmp_path / "job.yaml", tmp_path / "m")


def test_a_job_is_frozen_and_travels(tmp_path: Path) -> None:
    job = load(tmp_path)
    with pytest.raises(ValidationError):
        job.engine.threads = 5  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(job))
    assert (again, again.source) == (job, job.source)


@pytest.mark.parametrize(("key", "value", "same"), [
    ("name", "other", True),
    ("engine.threads", "2", True),
    ("commit.rows", "5", True),
    ("output.path", "elsewhere", True),
    ("output.rows_per_file", "5", True),
    ("on_error.publish", "true", True),
    ("cache.path", "c", True),
    ("sampling.temperature", "0.0", True),
    ("input.limit", "5", False),
    ("prompt.user", "'{{ r }}'", False),
    ("sampling.seed", "1", False),
    ("sampling.from_columns", "[]", True),
    ("sampling.from_columns", "[seed]", False),
    ("output.columns", "[a]", False),
    ("input.workers", "3", True),
    ("model.max_model_len", "5", False),
    ("model.dtype", "float32", False),
    ("model.quantization", "none", True),
    ("model.quantization", "int8", False),
])  # fmt: skip
def test_identity_is_what_the_rows_depend_on(tmp_path: Path, key: str, value: str, same: bool) -> None:
    plain, other = load(tmp_path).identity_json(), load(tmp_path, MINIMAL, (key, value)).identity_json()
    assert (plain == other) is same
    assert json.dumps(json.loads(plain), sort_keys=True, separators=(",", ":")) == plain


def test_a_parameter_that_is_written_out_counts_for_openai_requests(tmp_path: Path) -> None:
    """Other parameters have the defaults of OpenAI's API."""
    text = MINIMAL.replace('prompt: {user: "{{ q }}"}\n', "").replace("input: {", "input: {format: openai, ")
    plain, said = load(tmp_path, text), load(tmp_path, text, ("sampling.temperature", "0"))
    assert plain.identity_json() != said.identity_json()
    assert "max_tokens" not in said.describe()
    assert "temperature: 0" in said.describe()
    assert "as OpenAI's API does" in plain.describe()


# What published results were made of. None of this may ever change: an option that is added later is absent at its
# default, and the defaults stay.
PLAIN: dict[str, Any] = {
    "input": {"path": "/rows.jsonl"},
    "model": {"path": "/m"},
    "prompt": {"user": "{{ q }}"},
}
INT8 = {"path": "/m", "dtype": "float32", "max_model_len": 64, "quantization": "int8"}
SAMPLED = {"temperature": 0.5, "stop": ["x"], "from_columns": [["seed", "seed"]]}
FEW = {"path": "/rows.jsonl", "limit": 5, "id": "n"}
IDENTITIES: list[tuple[tuple[tuple[str, str], ...], dict[str, Any]]] = [
    ((), PLAIN),
    ((("model.quantization", "int8"), ("model.dtype", "float32"), ("model.max_model_len", "64")),
        {**PLAIN, "model": INT8}),
    ((("sampling.temperature", "0.5"), ("sampling.stop", "[x]"), ("sampling.from_columns", "[seed]")),
        {**PLAIN, "sampling": SAMPLED}),
    ((("input.limit", "5"), ("input.id", "n"), ("output.columns", "[a]")), {**PLAIN, "input": FEW, "columns": ["a"]}),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "wanted"), IDENTITIES)
def test_the_identity_of_an_older_job_stays(
    tmp_path: Path, settings: tuple[tuple[str, str], ...], wanted: dict[str, Any]
) -> None:
    """Results published before an option existed belong to jobs that omit the option."""
    text = load(tmp_path, MINIMAL, *settings).identity_json()
    assert json.loads(text.replace(str(tmp_path), "")) == wanted


def test_the_defaults_that_an_identity_leaves_out_stay() -> None:
    """A changed default would change the meaning of a stored identity that omits the option.

    Add new options here, and never change an existing one. `none` was once the default of quantization.
    """
    sections = (ModelSection, InputSection, PromptSection)
    model, source, prompt = (
        {n: f.default for n, f in s.model_fields.items() if not f.is_required()} for s in sections
    )
    assert model == {
        **dict.fromkeys(("dtype", "quantization", "calibration", "kv_cache_dtype"), "auto"),
        **dict.fromkeys(("max_model_len", "adapter", "adapter_from_column")),
        "adapters": {},
    }
    assert source == {
        **dict.fromkeys(("sql_memory", "format", "workers", "delimiter"), "auto"),
        **dict.fromkeys(("path", "sql", "id", "expected", "limit", "min_rows")),
        **dict.fromkeys(("unique_ids", "allow_empty"), False),
        "max_line_bytes": 2**24,
        "encoding": "utf-8",
        "quote": '"',
    }
    assert prompt == {
        **dict.fromkeys(("reasoning", "tool_calls", "tool_choice"), "auto"),
        **dict.fromkeys(("system", "user", "messages", "text", "token_ids", "chat_template")),
        **dict.fromkeys(("template_arguments", "tools", "tools_from_column")),
        "truncate": "error",
        "chat": True,
        "template_arguments_from_columns": (),
    }


@pytest.mark.parametrize(
    ("where", "line"),
    [("prompt.user", 4), ("output.columns", 5), ("engine.threads", None), ("commit.rows", 6)],
)
def test_later_mistakes_have_their_line_too(tmp_path: Path, where: str, line: int | None) -> None:
    job = load(tmp_path, MINIMAL + "commit:\n", ("commit.rows", "3"))
    error = job.mistake(where, "is wrong")
    assert (error.path, error.mistakes) == (str(tmp_path / "job.yaml"), (Mistake(where, "is wrong", line),))


def test_describe_leaves_out_what_has_its_default(tmp_path: Path) -> None:
    job = load(tmp_path, MINIMAL + "engine: {kv_memory: 1GiB, threads: auto}\ncommit: {rows: auto}\n")
    lines = [line.strip() for line in job.describe().splitlines()]
    assert "kv_memory: 1,073,741,824 bytes" in lines
    assert not {"threads: auto", "commit", "rows: auto", "cache", "deadline: none"} & set(lines)


def test_describe_lists_every_option_on_request(tmp_path: Path) -> None:
    job = load(tmp_path, MINIMAL + "engine: {kv_memory: 1GiB}\n")
    lines = [line.strip() for line in job.describe(defaults=True).splitlines()]
    assert lines[0] == f"triage ({tmp_path / 'job.yaml'})"
    assert {
        "max_model_len: auto",
        "kv_memory: 1,073,741,824 bytes",
        "limit: none",
        "keep: 30",
        "top_p: 1.0",
        "dtype: auto",
    } <= set(lines)
    assert f"path: {tmp_path / 'results'}" in lines


def test_sampling_has_the_fields_defaults_and_bounds_of_a_row() -> None:
    assert list(SamplingSection.model_fields) == [*SAMPLING_PARAMETERS, "n", "best_of", "from_columns"]
    assert SamplingSection().params() == SamplingParams()
    given = SamplingSection().model_dump(
        exclude={"n", "best_of", "from_columns", "choice", "allowed_token_ids"}
    )  # a row's empty choice is a mistake
    assert override(SamplingParams(), given) == SamplingParams()


def test_result_columns_are_those_that_are_written() -> None:
    assert list(RESULT_COLUMNS) == RESULT_SCHEMA.names
    asked: Any = SimpleNamespace(
        own_dimensions=False, embedding=Embedding("last", True, 3), scoring=Scoring()
    )
    kinds = {
        "embed": VectorsKind(),
        "score": ScoresKind(),
        "classify": LabelsKind(),
        "rerank": RelevanceKind(),
    }
    for task in TASK_COLUMNS:
        assert list(task_columns(task)) == kinds[task].schema(asked).names


def test_a_dumped_section_is_a_section() -> None:
    spec = EngineSection(kv_memory=1 << 32)
    assert EngineSection.model_validate(spec.model_dump()) == spec
