"""Invalid job files: all mistakes at once, each with its line, the value found and the valid values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchinfer.core.errors import InputMissing, JobFileError, Mistake
from batchinfer.job import load_job, yaml_tree

GOOD = """\
name: triage
model: {path: m}
input: {path: data/rows.jsonl}
prompt: {user: "{{ q }}"}
output: {path: results}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "file.txt").write_text("not a folder")
    return tmp_path


def mistakes(folder: Path, text: str | bytes, overrides: tuple[tuple[str, str], ...] = ()) -> list[Mistake]:
    path = folder / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(JobFileError) as caught:
        load_job(path, overrides, env={"SET": "x", "N": "5", "EMPTY": ""})
    assert caught.value.exit_code == 78
    assert str(path) in str(caught.value)
    return list(caught.value.mistakes)


def instead(section: str, *lines: str) -> str:
    """Return GOOD with the lines of one section replaced."""
    old = next(line for line in GOOD.splitlines() if line.startswith(f"{section}:"))
    return GOOD.replace(old, "\n".join(lines))


def bomb() -> str:
    levels = "".join(f"k{n}: &k{n} [{', '.join([f'*k{n - 1}'] * 9)}]\n" for n in range(1, 10))
    return f"k0: &k0 [lol]\n{levels}"


# name → (text, [(line, where, words of the message or hint), …]); all that is reported, in this order.
Expected = list[tuple[int | None, str, tuple[str, ...]]]
CASES: dict[str, tuple[str | bytes, Expected]] = {
    # the file as YAML
    "empty": ("", [(None, "", ("is empty", "batchinfer init"))]),
    "only comments": ("# nothing\n\n", [(None, "", ("is empty",))]),
    "a null document": ("---\n", [(None, "", ("is empty",))]),
    "a list": ("\n- a\n", [(2, "", ("found a list", "mapping of sections"))]),
    "one word": ("hello\n", [(1, "", ("found a single value",))]),
    "bad UTF-8": (b"name: a\nmodel: \xff\n", [(2, "", ("0xff", "UTF-8"))]),
    "UTF-16": ("name: a\n".encode("utf-16"), [(1, "", ("UTF-8",))]),
    "a control character": ("name: a\nx: \x07\n", [(2, "", ("U+0007",))]),
    "a NUL escape": (instead("name", r'name: "a\0b"'), [(1, "name", ("NUL",))]),
    "half a surrogate": (instead("prompt", r'prompt: {user: "\ud83d"}'), [(4, "prompt.user", ("surrogate",))]),
    "a tab": ("name: a\nmodel:\n\tpath: m\n", [(3, "", ("not valid YAML", "spaces, not tabs"))]),
    "open quotes": ('name: "a\nmodel: {}\n', [(3, "", ("began in line 1", "close the quotes"))]),
    "a colon in text": ("name: a: b\n", [(1, "", ("not valid YAML", "in quotes"))]),
    "bad indentation": ("model:\n   path: m\n  dtype: auto\n", [(3, "", ("same column",))]),
    "open bracket": ("name: a\nx: [1, 2\n", [(3, "", ("not valid YAML",))]),
    "a second document": (GOOD + "---\nname: b\n", [(6, "", ("second YAML document",))]),
    "a directive": ("%YAML 1.1\n---\n" + GOOD, [(1, "", ("directive", "remove"))]),
    "unquoted Jinja": ("prompt:\n  user: {{ body }}\n", [(2, "prompt.user", ("key must be plain", "quotes"))]),
    "unquoted variable in braces": ("model: {path: ${SET}}\n", [(1, "", ("not valid YAML", "in quotes"))]),
    "a python tag": ("x: !!python/object/apply:os.system ['true']\n" + GOOD,
        [(1, "x", ("tag", "python/object", "remove it")), (1, "x", ("no key",))]),
    "any tag": (instead("name", "name: !env HOME"), [(1, "name", ('"!env"',))]),
    "a standard tag": (instead("name", "name: !!str 5"), [(1, "name", ("tag",))]),
    "duplicate keys": (instead("model", "model:", "  path: m", "  dtype: auto", "  path: m2") + "name: again\n",
        [(5, "model.path", ("twice", "line 3")), (9, "name", ("twice", "line 1"))]),
    "an unknown alias": ("name: *nobody\n", [(1, "name", ("*nobody", "&nobody"))]),
    "an alias of itself": ("name: &a [*a]\n", [(1, "name", ("*a",))]),
    "a billion laughs": (bomb(), [(7, "k6", ("too large", "aliases"))]),
    "deep nesting": ("x: " + "[" * 200 + "]" * 200, [(1, "", ("at most 32 deep",))]),
    "merge keys": ("x: &x {path: m}\n" + instead("model", "model: {<<: *x, path: m}"),
        [(1, "x", ("no key",)), (3, "model.<<", ('no key "<<"',))]),
    "a huge number": (instead("prompt", GOOD.splitlines()[3],
        f"sampling: {{seed: {'9' * 5000}, top_p: {'9' * 390}}}"), [(5, "sampling.top_p", ("up to 1",)),
        (5, "sampling.seed", ("whole number",))]),
    "too little for a query": (instead("input", 'input: {sql: "select 1 as q", sql_memory: 10MiB}'),
        [(3, "input.sql_memory", ("10MiB", "from 64MiB", "auto"))]),
    "a query's memory for files": (instead("input", "input: {path: r.jsonl, sql_memory: 1GiB}"),
        [(3, "input.sql_memory", ("applies only to a query", "remove it"))]),
    # parameters of rows
    "no such parameter": (instead("output", "sampling: {from_columns: [temprature]}", "output: {path: results}"),
        [(5, "sampling.from_columns", ('"temprature"', "did you mean temperature?"))]),
    "a parameter twice": (instead("output", "sampling: {from_columns: [seed, seed]}", "output: {path: results}"),
        [(5, "sampling.from_columns", ("seed twice",))]),
    "a parameter from no column": (instead("output", "sampling: {from_columns: {seed: 7}}",
        "output: {path: results}"), [(5, "sampling.from_columns", ("the number 7", "name of a column"))]),
    "one parameter as text": (instead("output", "sampling: {from_columns: seed}", "output: {path: results}"),
        [(5, "sampling.from_columns", ('the text "seed"', "[max_tokens]", "{temperature: temp_col}"))]),
    "parameters of requests": (instead("input",
        "input: {path: r.jsonl, format: openai}").replace('prompt: {user: "{{ q }}"}\n',
        "sampling: {from_columns: [seed]}\n"), [(4, "sampling.from_columns", ("OpenAI", "remove it"))]),
    # sections and keys
    "nothing that is needed": ("engine: {}\n", [(None, "name", ("missing",)), (None, "model", ("missing", "path")),
        (None, "input", ("missing",)), (None, "output", ("missing",)),
        (None, "prompt", ("missing", "exactly one of"))]),
    "empty sections": ("name: a\nmodel:\ninput:\nprompt:\noutput:\nsampling:\n",
        [(2, "model.path", ("missing",)), (3, "input", ("neither path nor sql",)), (4, "prompt", ("missing",)),
        (5, "output.path", ("missing",))]),
    "unknown keys": ("modle: {}\n" + instead("model", "model: {path: m, dtyp: auto}")
        + "sampling: {max_new_tokens: 5, device: cpu}\nengine: {sampling: 1, zzz: 2}\nmax_tokens: 5\n",
        [(1, "modle", ("did you mean model?",)), (3, "model.dtyp", ("did you mean dtype?",)),
        (7, "sampling.max_new_tokens", ("did you mean max_tokens?",)),
        (7, "sampling.device", ("did you mean engine.device?",)), (8, "engine.sampling", ("section of its own",)),
        (8, "engine.zzz", ("known keys: device",)), (9, "max_tokens", ("did you mean sampling.max_tokens?",))]),
    "values for sections": ("name: [a]\nmodel: m\ninput: [a]\nprompt: hello\noutput: results\nengine: 5\ncache: c\n",
        [(1, "name", ("found a list", "200 characters")), (2, "model",
        ('found the text "m"', "section with keys among path")), (3, "input", ("found a list", "section")),
        (4, "prompt", ('"hello"', "section")), (5, "output", ("section",)), (6, "engine", ("number 5", "section")),
        (7, "cache", ("section",))]),
    # values
    "numbers as text and text as numbers": (GOOD
        + 'sampling: {max_tokens: "64", temperature: "0", seed: 1.5}\nengine: {threads: "4"}\n',
        [(6, "sampling.max_tokens", ('the text "64"', "whole number from 1 to", "without quotes")),
        (6, "sampling.temperature", ('the text "0"', "a number from 0 to 100")),
        (6, "sampling.seed", ("the number 1.5", "whole number")), (7, "engine.threads",
        ('the text "4"', "from 1 to 1,024, or auto"))]),
    "booleans are no numbers": (GOOD + "sampling: {max_tokens: true, top_p: false, ignore_eos: 1}\n",
        [(6, "sampling.max_tokens", ("found true", "whole number")), (6, "sampling.top_p",
        ("found false", "a number above 0")), (6, "sampling.ignore_eos", ("the number 1", "true or false"))]),
    "no is a text": (GOOD + "on_error: {publish: no}\nengine:\n  enable_prefix_caching: on\n",
        [(6, "on_error.publish", ('"no"', "true or false", "YAML 1.2")),
        (8, "engine.enable_prefix_caching", ('"on"', "true or false"))]),
    "out of range": (GOOD
        + "sampling:\n  max_tokens: 0\n  min_tokens: -1\n  temperature: -0.1\n  top_p: 0\n  top_k: -1\n  min_p: 1.1\n"
        + "  repetition_penalty: 1.0e-40\n  presence_penalty: 101\n  frequency_penalty: .inf\n"
        + "  seed: 9223372036854775808\n  repetition_stop: -1\n  logit_bias: {5: -100.5}\n",
        [(7, "sampling.max_tokens", ("number 0", "from 1 to 2,147,483,647")),
        (8, "sampling.min_tokens", ("number -1", "from 0")), (9, "sampling.temperature", ("-0.1", "from 0 to 100")),
        (10, "sampling.top_p", ("number 0", "above 0 and up to 1")), (11, "sampling.top_k", ("-1", "from 0")),
        (12, "sampling.min_p", ("1.1", "from 0 to 1")), (13, "sampling.repetition_penalty",
        ("1e-40", "from 0.01 to 100")), (14, "sampling.presence_penalty", ("from -100 to 100",)),
        (15, "sampling.frequency_penalty", ("inf", "from -100 to 100")),
        (16, "sampling.seed", ("9223372036854775808", "whole number")),
        (17, "sampling.repetition_stop", ("-1", "from 0 to 2,147,483,647")),
        (18, "sampling.logit_bias", ("the bias of token 5", "from -100 to 100, not -100.5"))]),
    "min above max": (GOOD + "sampling:\n  min_tokens: 65\n  max_tokens: 64\n",
        [(7, "sampling.min_tokens", ("65", "max_tokens, which is 64"))]),
    "min above the default max": (GOOD + "sampling: {min_tokens: 300, top_p: 2}\n",
        [(6, "sampling.top_p", ("number 2",)), (6, "sampling.min_tokens", ("300", "256"))]),
    "stops": (GOOD + 'sampling:\n  stop:\n    - a\n    - ""\n  stop_token_ids: [1, -1]\n',
        [(9, "sampling.stop", ("item 2", "1 to 512")), (10, "sampling.stop_token_ids", ("number -1 as item 2",))]),
    "too many stops": (GOOD + f"sampling: {{stop: [{', '.join('a' * 17)}]}}\n",
        [(6, "sampling.stop", ("has 17 items", "the limit is 16"))]),
    "too many labels": (GOOD.replace("\n", "\ntask: classify\n", 1)
        + f"classify: {{choices: {json.dumps([*map(str, range(1001))])}}}\n",
        [(7, "classify.choices", ("has 1,001 items", "the limit is 1,000"))]),
    "engine values": (GOOD + "engine:\n  device: gpu\n  max_num_seqs: 0\n  max_num_batched_tokens: many\n"
        + "  block_size: 2000\n  threads: null\n", [(7, "engine.device",
        ("one of auto, cpu, cuda", 'did you mean "cuda"?')), (8, "engine.max_num_seqs", ("number 0", "or auto")),
        (9, "engine.max_num_batched_tokens", ('"many"', "or auto")), (10, "engine.block_size",
        ("from 1 to 1,024, or auto",)), (11, "engine.threads", ("nothing (null)", "or auto"))]),
    "no truth value": (GOOD + "engine: {deterministic: yes}\n", [(6, "engine.deterministic",
        ('"yes"', "true or false", "YAML 1.2"))]),
    "unsupported by a CPU in float16": (instead("model", "model: {path: m, quantization: int8, dtype: float16}")
        + "engine:\n  device: cpu\n  deterministic: true\n", [(2, "model.quantization",
        ("is int8", "not available in float16 on a CPU", "bfloat16 or float32")),
        (8, "engine.deterministic", ("is true", "not available in float16 on a CPU"))]),
    "a cache of codes on a CPU": (instead("model", "model: {path: m, kv_cache_dtype: fp8}")
        + "engine: {device: cpu}\n", [(2, "model.kv_cache_dtype", ("is fp8", "only a GPU can read", "use int8",
        "device: cuda"))]),
    "a cache of codes in float16 on a CPU": (instead("model",
        "model: {path: m, kv_cache_dtype: int8, dtype: float16}") + "engine: {device: cpu}\n",
        [(2, "model.kv_cache_dtype", ("is int8", "not available in float16 on a CPU"))]),
    "fp8 on a CPU": (instead("model", "model: {path: m, quantization: fp8}") + "engine: {device: cpu}\n",
        [(2, "model.quantization", ("is fp8", "only a GPU can multiply in fp8", "use int8"))]),
    "another cache": (instead("model", "model: {path: m, kv_cache_dtype: fp4}"),
        [(2, "model.kv_cache_dtype", ("fp4", "one of auto, int8, fp8"))]),
    "kv_memory of the wrong unit": (GOOD + "engine: {kv_memory: 4gigs}\n", [(6, "engine.kv_memory", ("4GiB",))]),
    "kv_memory over one": (GOOD + "engine: {kv_memory: 1.5}\n", [(6, "engine.kv_memory", ("1.5", "share"))]),
    "kv_memory without a unit": (GOOD + "engine: {kv_memory: 4}\n", [(6, "engine.kv_memory", ("4GiB",))]),
    "kv_memory of nothing": (GOOD + "engine: {kv_memory: 0GiB}\n", [(6, "engine.kv_memory", ("0GiB",))]),
    "kv_memory true": (GOOD + "engine: {kv_memory: true}\n", [(6, "engine.kv_memory", ("found true",))]),
    "experts divided twice": (GOOD + "engine: {tensor_parallel_size: 2, expert_parallel_size: 4}\n",
        [(6, "engine.expert_parallel_size", ("is 4", "tensor_parallel_size is 2", "one of the two"))]),
    "nodes": (GOOD + "engine:\n  nodes: {listen: here, token_file: t, count: 1}\n",
        [(7, "engine.nodes", ("was removed", "--ray auto"))]),
    "ray": (GOOD + "ray: {address: 'ray://here:1', engines: {min: 3, max: 2}, labels: {a: 1}}\n",
        [(6, "ray.address", ("ray://here:1", "HOST:PORT")), (6, "ray.labels", ("number 1", "text of a label")),
        (6, "ray.engines", ("min 3 above max 2",))]),
    "ray and data_parallel": (GOOD + "ray: {address: auto}\nengine: {data_parallel: 2}\n",
        [(7, "engine.data_parallel", ("ray.engines", "remove it"))]),
    "budget and commits": (GOOD + "on_error: {max_error_rate: 5}\ncommit: {rows: 0, seconds: 0}\n",
        [(6, "on_error.max_error_rate", ("number 5", "from 0 to 1")), (7, "commit.rows", ("number 0",)),
        (7, "commit.seconds", ("above 0 and up to 3,600",))]),
    "a ladder that is no list": (GOOD + "on_invalid: {temperature: 1}\n",
        [(6, "on_invalid", ("a mapping", "[{temperature: 0.7, seed: 1}"))]),
    "an unknown parameter of a rung": (GOOD + "on_invalid: [{temprature: 1}]\n",
        [(6, "on_invalid", ('"temprature" in item 1', "did you mean temperature?"))]),
    "a rung that says what an answer looks like": (GOOD + "on_invalid: [{temperature: 1}, {choice: [a]}]\n",
        [(6, "on_invalid", ('"choice" in item 2', "there are max_tokens"))]),
    "an empty rung": (GOOD + "on_invalid: [{}]\n", [(6, "on_invalid",
        ("an empty mapping as item 1", "{temperature: 0.7}"))]),
    "a value of a rung": (GOOD + "on_invalid: [{max_tokens: 2.5}]\n",
        [(6, "on_invalid", ("number 2.5 for max_tokens in item 1", "a whole number from 1"))]),
    "too many rungs": (GOOD + "on_invalid:\n" + "".join(f"  - {{max_tokens: {300 + n}}}\n" for n in range(9)),
        [(6, "on_invalid", ("has 9 items", "8 are the most"))]),
    "rungs that change nothing": (GOOD
        + "sampling: {min_tokens: 5}\non_invalid: [{seed: 3}, {max_tokens: 2}, {max_tokens: 2}]\n",
        [(7, "on_invalid", ("in item 1 for what attempt 1 asks for", "a seed")),
        (7, "on_invalid", ("min_tokens 5 in item 2", "which is 2")), (7, "on_invalid",
        ("min_tokens 5 in item 3", "which is 2")), (7, "on_invalid", ("in item 3 for what attempt 3 asks for",))]),
    "answers that are cut whatever a rung says": (GOOD
        + "sampling: {ignore_eos: true}\non_invalid: [{temperature: 1}]\n",
        [(7, "on_invalid", ("sampling.ignore_eos", "all answers are cut"))]),
    "the column of a ladder": (GOOD.replace("{path: results}", "{path: results, columns: [Attempt]}")
        + "on_invalid: [{seed: 1}]\n" "sampling: {temperature: 1}\n",
        [(5, "output.columns", ("the result of a job with on_invalid",))]),
    "model values": (instead("model", "model:", "  path: nowhere", "  dtype: bf16", "  max_model_len: 0",
        "  quantization: w8a8"), [(3, "model.path", ("nowhere", "does not exist")),
        (4, "model.dtype", ("one of auto, float32", 'did you mean "bfloat16"?')),
        (5, "model.max_model_len", ("number 0", "or auto")), (6, "model.quantization",
        ('"w8a8"', "one of auto, none, int4, int8", 'did you mean "int8"?'))]),
    "model is a file": (instead("model", "model: {path: file.txt}"), [(2, "model.path", ("not a folder",))]),
    "addresses and homes": (instead("model", "model: {path: ~/m}").replace("path: results", "path: s3://bucket/x"),
        [(2, "model.path", ("${HOME}",)), (5, "output.path", ("s3://bucket/x", "not supported", "local or mounted",
        "copy"))]),
    "empty texts": ('name: ""\nmodel: {path: ""}\ninput: {path: []}\nprompt: {user: ""}\noutput: {path: ""}\n',
        [(1, "name", ("is empty",)), (2, "model.path", ("is empty",)), (3, "input.path", ("is empty",)),
        (4, "prompt.user", ("is empty",)), (5, "output.path", ("is empty",))]),
    # between fields
    "two inputs": (instead("input", "input:", "  path: a.jsonl", "  sql: select 1", "  format: jsonl"),
        [(5, "input.sql", ("together with path",)), (6, "input.format", ("not to a query (sql)",))]),
    "input values": (instead("input",
        "input: {path: [a.jsonl, 5], limit: 0, unique_ids: true, format: xlsx, max_line_bytes: 1X}"),
        [(3, "input.path", ("number 5 as item 2", "list of them")), (3, "input.format",
        ("one of auto, jsonl, parquet, csv, arrow, openai",)), (3, "input.limit", ("number 0",)),
        (3, "input.max_line_bytes", ('"1X"',)), (3, "input.unique_ids", ("no input.id",))]),
    "a prompt for OpenAI files": (instead("input", "input: {path: a.jsonl, format: openai, id: x}"),
        [(3, "input.id", ("custom_id",)), (4, "prompt", ("input.format: openai",))]),
    "no prompt source": (instead("prompt", "prompt: {system: hi}"), [(4, "prompt", ("none of user, messages",))]),
    "three prompt sources": (instead("prompt", "prompt:", "  user: a", "  messages: b", "  text: c"),
        [(6, "prompt.messages", ("together with user",)), (7, "prompt.text", ("together with user", "exactly one"))]),
    "system with a plain text": (instead("prompt", "prompt:", "  system: hi", "  token_ids: ids"),
        [(5, "prompt.system", ("token_ids takes the prompt as it is",))]),
    "templates": (instead("prompt", "prompt:", "  system: |", "    fine", "    {{ broken", "  user: >-",
        "    {% if x %}"), [(7, "prompt.system", ("Jinja",)), (8, "prompt.user", ("Jinja",))]),
    "template names": (instead("prompt", "prompt:", "  system: '{% include \"x\" %}'",
        "  user: '{{ a | shout }}{{ a is odd_one }}'"), [(5, "prompt.system", ("another template",)),
        (6, "prompt.user", ('filter "shout"',)), (6, "prompt.user", ('test "odd_one"',))]),
    "a bottomless template": (instead("prompt", "prompt:", f"  user: '{{{{ {'(' * 5000} }}}}'"),
        [(5, "prompt.user", ("nests too deeply",))]),
    "an endless chain of filters": (instead("prompt", "prompt:", f"  user: '{{{{ a{'|upper' * 5000} }}}}'"),
        [(5, "prompt.user", ("nests too deeply",))]),
    "columns": (instead("output", "output:", "  path: results", "  columns:", "    - a", "    - STATUS", "    - a",
        "    - A", "    - 5"), [(9, "output.columns", ('"STATUS"', "every result has", "input.sql")),
        (10, "output.columns", ('"a" is listed twice',)), (11, "output.columns", ("differ only in case",)),
        (12, "output.columns", ("number 5 as item 5", "name of a column"))]),
    "output values": (instead("output", "output: {path: 5, columns: a, rows_per_file: 0}"),
        [(5, "output.path", ("number 5", "a path")), (5, "output.columns", ('"a"', "a list")),
        (5, "output.rows_per_file", ("number 0",))]),
    "output in the input folder": (instead("input", "input: {path: data/**/*.parquet}").replace("path: results",
        "path: data/out"), [(5, "output.path", ("input's folder", "separate folder"))]),
    "output holds the input": (GOOD.replace("path: results", "path: data"),
        [(5, "output.path", ("holds the input",))]),
    "output holds the job file": (GOOD.replace("path: results", "path: .").replace("data/rows", "/nowhere/rows"),
        [(5, "output.path", ("holds the model",)), (5, "output.path", ("holds the job file",))]),
    "output is the model": (GOOD.replace("path: results", "path: ./x/../m"),
        [(5, "output.path", ("the model's folder",))]),
    "output in the model": (GOOD.replace("path: results", "path: m/x"),
        [(5, "output.path", ("the model's folder",))]),
    "cache in the output": (GOOD + "cache: {path: results/c}\n", [(6, "cache.path", ("results' folder",))]),
    "cache in the model": (GOOD + "cache: {path: m/c}\n", [(6, "cache.path", ("the model's folder",))]),
    "cache among the input": (instead("input", "input: {path: data/**/*.parquet}") + "cache: {path: data/c}\n",
        [(6, "cache.path", ("is among the input", "a later run would read it"))]),
    # variables
    "unset variables": (instead("prompt", "prompt:", "  user: |", "    one",
        "    ${NOPE} ${SET} ${NOPE2:-ok} ${NOPE3}"), [(7, "prompt.user", ("NOPE ", ":-default}")),
        (7, "prompt.user", ("NOPE3",))]),
    "no variables": (instead("name", 'name: "${"', "cache:", '  path: "${a b} ${1x} $${SET}/${SET"'),
        [(1, "name", ("is not a variable", "$$")), (3, "cache.path", ('"${a b}"', "$$")),
        (3, "cache.path", ('"${1x}"',)), (3, "cache.path", ('"${SET"', "$$"))]),
    "a variable stays a text": (GOOD + 'sampling: {max_tokens: "${N}"}\n',
        [(6, "sampling.max_tokens", ('the text "5"', "--set"))]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_mistake_is_reported_at_once(folder: Path, name: str) -> None:
    text, expected = CASES[name]
    got = mistakes(folder, text)
    assert [(one.line, one.where.replace('"', "")) for one in got] == [
        (line, key) for line, key, _ in expected
    ]
    for one, (_, _, words) in zip(got, expected, strict=True):
        said = f"{one.message} ({one.hint})"
        assert [word for word in words if word not in said] == [], said
        assert len(one.message) < 400, "messages are for people"
        assert not any(
            word in one.message for word in ("\n", "Input should", "pydantic", "NoneType", "str |", "<class")
        )


def test_a_mistake_of_an_override_names_the_override_and_no_line(folder: Path) -> None:
    given = (
        ("engine.max_num_seqs", "'64'"),
        ("engine.max_nmu_seqs", "64"),
        ("engin.threads", "1"),
        ("name.first", "x"),
        ("a..b", "1"),
        ("sampling", "{max_tokens: 0}"),
        ("prompt.user", "{{ x }}"),
        ("output.path", "${NOPE}"),
        ("commit.rows", "!x 5"),
    )
    got = {one.where: f"{one.message} ({one.hint})" for one in mistakes(folder, GOOD, given)}
    assert set(got) == {f"--set {key}" for key, _ in given if key != "a..b"} | {'--set a."".b'}
    assert 'the text "64"' in got["--set engine.max_num_seqs"]
    assert "did you mean max_num_seqs?" in got["--set engine.max_nmu_seqs"]
    assert "did you mean engine?" in got["--set engin.threads"]
    assert "name is a value" in got["--set name.first"]
    assert "SECTION.KEY=VALUE" in got['--set a."".b']
    assert "sampling.max_tokens: found the number 0" in got["--set sampling"]
    assert "in quotes" in got["--set prompt.user"]
    assert "NOPE" in got["--set output.path"]
    assert "tag" in got["--set commit.rows"]
    assert all(one.line is None for one in mistakes(folder, GOOD, given))


def test_mistakes_of_file_and_override_come_together(folder: Path) -> None:
    got = mistakes(
        folder, GOOD + "sampling: {top_p: 2}\n", (("engine.threads", "0"), ("sampling.top_k", "-1"))
    )
    assert [(one.line, one.where) for one in got] == [
        (6, "sampling.top_p"),
        (None, "--set sampling.top_k"),
        (None, "--set engine.threads"),
    ]


def test_an_override_repairs_what_the_file_has_wrong(folder: Path) -> None:
    text = GOOD.replace("results", '"${NOPE}"') + "sampling: {max_tokens: 0}\n"
    (folder / "job.yaml").write_text(text)
    job = load_job(folder / "job.yaml", [("sampling.max_tokens", "9"), ("output.path", "r")], env={})
    assert (job.sampling.max_tokens, job.output.path) == (9, folder / "r")


@pytest.mark.parametrize("date", ["today", "2026-02-30", "2026-2-3", "20260203", ""])
def test_a_date_that_is_none(folder: Path, date: str) -> None:
    (folder / "job.yaml").write_text(GOOD)
    with pytest.raises(JobFileError, match="YYYY-MM-DD"):
        load_job(folder / "job.yaml", date=date)


def test_a_job_file_that_cannot_be_read(folder: Path) -> None:
    with pytest.raises(JobFileError, match="cannot be read"):
        load_job(folder / "a\0b")


@pytest.mark.parametrize("name", ["nowhere.yaml", "m", "m/x/job.yaml"])
def test_a_job_file_that_is_not_there(folder: Path, name: str) -> None:
    with pytest.raises(InputMissing, match=rf"no job file {folder}/{name}.*batchinfer init"):
        load_job(folder / name)


def test_a_job_file_of_more_than_a_mebibyte(folder: Path) -> None:
    assert "at most 1,048,576 bytes" in mistakes(folder, b"#" * (1 << 20) + b"\n")[0].message


def test_too_many_values(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert yaml_tree.MAX_NODES == 100_000
    monkeypatch.setattr(yaml_tree, "MAX_NODES", 1_000)
    assert "at most 1,000 values" in mistakes(folder, "x:\n" + "- a\n" * 1_100)[0].message


def test_a_variable_cannot_grow_without_end(folder: Path) -> None:
    (folder / "job.yaml").write_text(instead("prompt", f'prompt: {{user: "{"${BIG}" * 1000}"}}'))
    with pytest.raises(JobFileError, match="grows over"):
        load_job(folder / "job.yaml", env={"BIG": "x" * 100_000})
