"""Everything that can be wrong with a job, its checkpoint and its input, and what a user is told about it."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchinfer.machine.hardware import nvidia_gpus
from batchinfer.pipeline.workers.engine_entry import ENGINE
from batchinfer.store.results.manifest import MANIFEST_NAME, Manifest
from tests import warm_commands
from tests.batchinfer.wrong_jobs import FAKE, NO_ENGINE, ROWS, CliOf, Ended, Place, environment, flip
from tests.checkpoints import edit_json, make_checkpoint
from tests.examples import first_of
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Wrong:
    """One wrong thing: the exit code, the words that the message must hold, how it is made, what is run.

    Each is told by `run` and by `validate` alike; by `preview` too, but for what rows that it leaves out hold, and for
    a result that `run --replace` may replace.
    """

    code: int
    words: tuple[str, ...]
    arrange: Callable[[Place], object]
    arguments: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ("run", "validate", "preview")
    engine: str = NO_ENGINE  # or one that loads, where it is found only once all rows are read


def cut(count: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:-count]


def wrong_crc(data: bytes) -> bytes:
    return data[:-8] + struct.pack("<I", zlib.crc32(data)) + data[-4:]


# The job file: 78, found by `validate` too.
JOB_FILES = {
    "a cache larger than the machine": Wrong(78, ("engine.kv_memory", "is more than this machine has", "use at most"),
        lambda p: p.job("engine: {device: cpu, kv_memory: 900000GiB}")),
    "unknown key": Wrong(78, ("job.yaml", "line 5", "sampling", "max_tokns", "did you mean max_tokens?"),
        lambda p: p.job(sampling="sampling: {max_tokns: 8}")),
    "wrong type": Wrong(78, ("line 5", "sampling.temperature", "hot"),
        lambda p: p.job(sampling="sampling: {temperature: hot}")),
    "out of range": Wrong(78, ("line 5", "sampling.top_p", "1.5"),
        lambda p: p.job(sampling="sampling: {top_p: 1.5}")),
    "duplicate key": Wrong(78, ("line 7", "name", "line 1"), lambda p: p.job("name: again")),
    "YAML tag": Wrong(78, ("line 1", "python/name:os.system", "remove it"),
        lambda p: p.job(name="name: !!python/name:os.system x")),
    "no YAML": Wrong(78, ("line 2", "not valid YAML"), lambda p: p.job(model="model: {path: [")),
    "several mistakes": Wrong(78, ("3 mistakes", "line 1: name", "line 3", "formt", "line 5", "sampling.max_tokens",
        "-1"), lambda p: p.job(name="name: [a]", input="input: {path: rows.jsonl, formt: x}",
        sampling="sampling: {max_tokens: -1}")),
    "unset variable": Wrong(78, ("line 6", "output.path", "NO_SUCH_VARIABLE"),
        lambda p: p.job(output='output: {path: "${NO_SUCH_VARIABLE}/x"}')),
    "template syntax": Wrong(78, ("line 4", "prompt.user"), lambda p: p.job(prompt='prompt: {user: "Say {{ text "}')),
    "unknown filter": Wrong(78, ("line 4", "prompt.user", "uper", "did you mean upper"),
        lambda p: p.job(prompt='prompt: {user: "{{ text | uper }}"}')),
    "two kinds of prompt": Wrong(78, ("line 4", "prompt", "user", "text"),
        lambda p: p.job(prompt="prompt: {user: a, text: b}")),
    "no output": Wrong(78, ("output",), lambda p: p.job(output="")),
    "no such parameter": Wrong(78, ("line 5", "sampling.from_columns", '"max_token"', "did you mean max_tokens?"),
        lambda p: p.job(sampling="sampling: {from_columns: [max_token]}")),
    "openai with prompt": Wrong(78, ("prompt", "openai"),
        lambda p: p.job(input="input: {path: rows.jsonl, format: openai}")),
    "no job file": Wrong(66, ("no job file", "job.yaml"), lambda p: (p.folder / "job.yaml").unlink()),
    "a folder as job file": Wrong(66, ("job.yaml",), lambda p: ((p.folder / "job.yaml").unlink(),
        (p.folder / "job.yaml").mkdir())),
    "too long for the model": Wrong(78, ("line 2", "model.max_model_len", "4096", "512", "leave it out"),
        lambda p: p.job(model="model: {path: model, max_model_len: 4096}")),
    "--set without =": Wrong(2, ("--set engine", "KEY=VALUE"), lambda p: None, ("--set", "engine")),
    "--set unknown key": Wrong(78, ("--set", "engine.threds", "did you mean threads?"), lambda p: None,
        ("--set", "engine.threds=1")),
    "--set wrong type": Wrong(78, ("--set", "commit.rows", "many"), lambda p: None, ("--set", "commit.rows=many")),
    "--date not a day": Wrong(78, ("--date", "2026-02-30", "YYYY-MM-DD"), lambda p: None, ("--date", "2026-02-30")),
    "--date not a date": Wrong(78, ("--date", "tomorrow"), lambda p: None, ("--date", "tomorrow")),
}  # fmt: skip


def pickled(p: Place) -> None:
    folder = p.own_model()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")


def sharded(p: Place, **wrong: str) -> Path:
    folder = p.own_model()
    make_checkpoint(folder, "llama", shards=2)
    (folder / "model.safetensors").unlink(missing_ok=True)
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"] |= wrong
    index.write_text(json.dumps(raw))
    return folder


def outside_link(p: Place) -> None:
    folder = p.own_model()
    shutil.move(folder / "tokenizer.json", p.folder / "elsewhere.json")
    (folder / "tokenizer.json").symlink_to(p.folder / "elsewhere.json")


def header(p: Place, text: bytes, length: int | None = None) -> None:
    data = struct.pack("<Q", len(text) if length is None else length) + text
    (p.own_model() / "model.safetensors").write_bytes(data)


def tokenizer_in_python(p: Place) -> None:
    folder = p.own_model()
    (folder / "tokenizer.json").unlink()
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": "code.T"})


def without_tensor(p: Place) -> None:
    from safetensors.numpy import load_file, save_file

    path = p.own_model() / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path)


def chat_template(p: Place, text: str) -> None:
    (p.own_model() / "chat_template.jinja").write_text(text)


def template_in_config(p: Place) -> None:
    folder = p.own_model()
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit_json(folder / "tokenizer_config.json", chat_template="a\n{{ messages[ }}")


def pipe(p: Place, name: str) -> None:
    path = p.own_model() / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def gguf_folder(p: Place, config: bool) -> None:
    folder = p.own_model()
    (folder / "model.safetensors").unlink()
    (folder / "x.gguf").write_bytes(b"GGUF")
    if not config:
        (folder / "config.json").unlink()


def made_folder(p: Place, name: str) -> None:
    path = p.own_model() / name
    path.unlink(missing_ok=True)
    path.mkdir()


def unix_socket(p: Place) -> None:
    path = p.own_model() / "tokenizer_config.json"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def device(p: Place) -> None:
    path = p.own_model() / "generation_config.json"
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


CHECKPOINTS = {
    "missing model folder": Wrong(78, ("line 2", "model.path", "nowhere"),
        lambda p: p.job(model="model: {path: nowhere}")),
    "no config.json": Wrong(78, ("config.json", "model"), lambda p: (p.own_model() / "config.json").unlink()),
    "config.json not JSON": Wrong(78, ("config.json", "not valid JSON"),
        lambda p: (p.own_model() / "config.json").write_text("{")),
    "unsupported architecture": Wrong(78, ("config.json", "model_type 'rwkv'", "llama, mistral, qwen2, qwen3"),
        lambda p: edit_json(p.own_model() / "config.json", architectures=["RwkvForCausalLM"], model_type="rwkv")),
    "no weights": Wrong(78, ("no weights", "model.safetensors"),
        lambda p: (p.own_model() / "model.safetensors").unlink()),
    "pickle only": Wrong(77, ("pytorch_model.bin", "pickle", "convert it to safetensors"), pickled),
    "auto_map": Wrong(77, ("config.json", "auto_map"), lambda p: edit_json(p.own_model() / "config.json",
        auto_map={"AutoModel": "code.Model"}, architectures=["OwnModel"])),
    "auto_map of the tokenizer": Wrong(77, ("tokenizer_config.json", "auto_map"), tokenizer_in_python),
    "a link that leaves": Wrong(77, ("tokenizer.json", "elsewhere.json", "copy"), outside_link),
    "shard outside": Wrong(77, ("index.json", "../outside.safetensors"),
        lambda p: sharded(p, **{"model.norm.weight": "../outside.safetensors"})),
    "shard absolute": Wrong(77, ("index.json", "/etc/x.safetensors"),
        lambda p: sharded(p, **{"lm_head.weight": "/etc/x.safetensors"})),
    "shard missing": Wrong(78, ("index.json", "model-00009.safetensors", "incomplete"),
        lambda p: sharded(p, **{"lm_head.weight": "model-00009.safetensors"})),
    "header too long": Wrong(77, ("model.safetensors", "malformed", "again"), lambda p: header(p, b"{}", 1 << 40)),
    "header not JSON": Wrong(77, ("model.safetensors", "malformed"), lambda p: header(p, b"{]")),
    "header with a hole": Wrong(77, ("model.safetensors", "malformed"),
        lambda p: header(p, b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}' + b"\0" * 8, 54)),
    "weights cut short": Wrong(77, ("model.safetensors", "malformed"),
        lambda p: (w := p.own_model() / "model.safetensors").write_bytes(w.read_bytes()[:-64])),
    "missing tensor": Wrong(78, ("missing tensors", "model.norm.weight"), without_tensor),
    "weights of another shape": Wrong(78, ("wrong shape", "model.layers.0.mlp.gate_proj.weight", "[64, 48]",
        "[96, 48]"), lambda p: edit_json(p.own_model() / "config.json", intermediate_size=96)),
    "no tokenizer": Wrong(78, ("model.path", "tokenizer.json is needed", "copy the checkpoint again"),
        lambda p: (p.own_model() / "tokenizer.json").unlink()),
    "damaged tokenizer": Wrong(78, ("model.path", "tokenizer.json cannot be read as a tokenizer"),
        lambda p: (p.own_model() / "tokenizer.json").write_text('{"a": 1}')),
    "tokenizer cut short": Wrong(78, ("model.path", "tokenizer.json cannot be read as a tokenizer"),
        lambda p: cut_file(p.own_model() / "tokenizer.json")),
    "tokenizer not UTF-8": Wrong(78, ("model.path", "tokenizer.json: the byte at 1 is not UTF-8"),
        lambda p: (p.own_model() / "tokenizer.json").write_bytes(b"{\xff}")),
    "a tokenizer that cannot be converted": Wrong(78, ("model.path", "cannot be converted"),
        lambda p: (p.own_model() / "tokenizer.json").rename(p.folder / "model" / "vocab.json")),
    "tokenizer_config.json not JSON": Wrong(78, ("tokenizer_config.json", "not valid JSON"),
        lambda p: cut_file(p.own_model() / "tokenizer_config.json")),
    "chat template with a syntax error": Wrong(78, ("model", "chat_template.jinja", "line 3", "unknown tag 'els'",
        "prompt.text"), lambda p: chat_template(p, "{% if a %}\nx\n{% els %}\n{% endif %}")),
    "chat template of tokenizer_config.json with a syntax error": Wrong(78,
        ("tokenizer_config.json (chat_template)", "line 2", "prompt.text"), template_in_config),
    "chat template that nests too deeply": Wrong(78, ("chat_template.jinja", "line 200", "nests too deeply",
        "prompt.text"), lambda p: chat_template(p, "{% if messages %}\n" * 200 + "x" + "{% endif %}\n" * 200)),
    "chat template of long sums": Wrong(78, ("chat_template.jinja", "line 2", "nests too deeply"),
        lambda p: chat_template(p, "\n{{ " + "+".join("a" * 5000) + " }}")),
    "chat template that breaks out of no loop": Wrong(78, ("chat_template.jinja", "cannot be compiled",
        "'break' outside loop"), lambda p: chat_template(p, "{% break %}")),
    "prompt that nests too deeply": Wrong(78, ("line 4", "prompt.user", "nests too deeply"),
        lambda p: p.job(prompt=f'prompt: {{user: "{"{% if text %}" * 120}x{"{% endif %}" * 120}"}}')),
    **{f"{name} is a pipe": Wrong(77, (name, "not a regular file", "copy"), partial(pipe, name=name))
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "model.safetensors",
        "model.safetensors.index.json", "processor_config.json")},
    "a GGUF file that was cut off": Wrong(78, ("model.path", "x.gguf", "inside its header",
        "the download may be incomplete"), lambda p: (p.bytes(b"GGUF", "x.gguf"),
        p.job(model="model: {path: x.gguf}"))),
    "a GGUF file that was cut off, in a folder": Wrong(78, ("model.path", "x.gguf", "inside its header"),
        partial(gguf_folder, config=False)),
    "a GGUF file that was cut off, beside config.json": Wrong(78, ("model.path", "x.gguf", "inside its header"),
        partial(gguf_folder, config=True)),
    "generation_config.json is a folder": Wrong(77, ("generation_config.json", "not a regular file"),
        lambda p: made_folder(p, "generation_config.json")),
    "chat_template.jinja is a folder": Wrong(77, ("chat_template.jinja", "not a regular file"),
        lambda p: made_folder(p, "chat_template.jinja")),
    "a socket": Wrong(77, ("tokenizer_config.json", "not a regular file"), unix_socket),
    "a device": Wrong(77, ("generation_config.json", "/dev/zero"), device),
    "chat template not UTF-8": Wrong(78, ("model.path", "chat_template.jinja: the byte at 0 is not UTF-8"),
        lambda p: (p.own_model() / "chat_template.jinja").write_bytes(b"\xff\xfe")),
}  # fmt: skip


def without_template(p: Place) -> None:
    edit_json(p.own_model() / "tokenizer_config.json", chat_template=...)
    (p.folder / "model" / "chat_template.jinja").unlink(missing_ok=True)


def cut_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def from_file(name: str, more: str = "") -> str:
    return f"input: {{path: {json.dumps(name)}{more}}}"


def damaged_page(p: Place) -> None:
    table = pa.table({"id": [f"r{i}" for i in range(500)], "text": [f"word {i}" for i in range(500)]})
    flip(p.parquet("rows.parquet", table), 6000)  # in the text column: the job reads no other
    p.job(input=from_file("rows.parquet"))


def two_schemas(p: Place) -> None:
    (p.folder / "a").mkdir()
    p.parquet("a/one.parquet")
    p.parquet("a/two.parquet", pa.table({"id": ["x"], "text": [7]}))
    p.job(input=from_file("a"))


def huge(p: Place) -> None:
    with (p.folder / "rows.jsonl").open("r+b") as file:
        file.truncate(1 << 42)  # of holes


def two_formats(p: Place) -> None:
    p.bytes(b'{"id":"x","text":"y"}\n', "a/one.jsonl")
    p.parquet("a/two.parquet")
    p.job(input=from_file("a"))


def from_sql(query: str) -> Callable[[Place], object]:
    return lambda p: p.job(input=f"input: {{sql: {json.dumps(query)}}}")


INPUTS = {
    "truncated gzip": Wrong(65, ("rows.jsonl.gz", "damaged gzip", "decompressed bytes", "truncated"),
        lambda p: (p.gzip("rows.jsonl.gz", cut(12)), p.job(input=from_file("rows.jsonl.gz"))),
        verbs=("run", "validate")),
    "bad CRC": Wrong(65, ("rows.jsonl.gz", "damaged gzip", "incorrect data check"),
        lambda p: (p.gzip("rows.jsonl.gz", wrong_crc), p.job(input=from_file("rows.jsonl.gz"))),
        verbs=("run", "validate")),
    "not gzip": Wrong(65, ("rows.jsonl.gz", "gzip"), lambda p: (p.bytes(b'{"text": "x"}\n', "rows.jsonl.gz"),
        p.job(input=from_file("rows.jsonl.gz")))),
    "not Parquet": Wrong(65, ("rows.parquet", "not a Parquet file"),
        lambda p: (p.bytes(b"id,text\n1,x\n", "rows.parquet"), p.job(input=from_file("rows.parquet")))),
    "Parquet cut short": Wrong(65, ("rows.parquet", "cut short"),
        lambda p: (p.bytes(p.parquet("rows.parquet").read_bytes()[:-20], "rows.parquet"),
        p.job(input=from_file("rows.parquet")))),
    "damaged page": Wrong(65, ("rows.parquet", "damaged after row"), damaged_page, verbs=("run", "validate")),
    "no space": Wrong(74, ("of disk", "are free", "make room"), huge),
    "differing schemas": Wrong(65, ("two.parquet", "'text'", "int64", "string", "one.parquet"), two_schemas),
    "two formats": Wrong(65, ("two.parquet", "is parquet", "one.jsonl", "one format"), two_formats),
    "UTF-16": Wrong(65, ("rows.jsonl", "UTF-16", "iconv"),
        lambda p: p.bytes('{"id": "x", "text": "y"}\n'.encode("utf-16"))),
    "missing file": Wrong(66, ("job.yaml: line 3: input.path", "Row.jsonl", "no such file", "did you mean",
        "rows.jsonl?"), lambda p: p.job(input=from_file("Row.jsonl"))),
    "empty glob": Wrong(66, ("line 3: input.path", "dta/*.jsonl", "matches no file", "did you mean data?"),
        lambda p: ((p.folder / "data").mkdir(), p.job(input=from_file("dta/*.jsonl")))),
    "empty folder": Wrong(66, ("data", "no input file", ".jsonl"), lambda p: ((p.folder / "data").mkdir(),
        p.job(input=from_file("data")))),
    "no rows": Wrong(66, ("job.yaml: line 3: input.path", "the input has no rows", "input.allow_empty: true"),
        lambda p: p.rows()),
    "failing query": Wrong(78, ("line 3", "input.sql", "nothing_here"), from_sql("select * from nothing_here")),
    "query of a missing file": Wrong(78, ("line 3", "input.sql", "gone.parquet"),
        from_sql("select * from 'gone.parquet'")),
    "query that writes": Wrong(78, ("line 3", "input.sql", "SELECT"), from_sql("create table t as select 1 as text")),
    "two queries": Wrong(78, ("line 3", "input.sql", "2 statement"), from_sql("select 1 as text; select 2 as text")),
    "column in no row, template": Wrong(78, ("line 4", "prompt", "no column 'txet'", "id, text",
        "did you mean 'text'?"), lambda p: p.job(prompt='prompt: {user: "{{ txet }}"}'), verbs=("run", "validate")),
    "column in no row, Parquet template": Wrong(78, ("line 4", "prompt", "no column 'txet'", "id, text",
        "did you mean 'text'?"), lambda p: (p.parquet("rows.parquet"),
        p.job(input=from_file("rows.parquet"), prompt='prompt: {user: "{{ txet }}"}'))),
    "column in no row, text": Wrong(78, ("line 4", "prompt.text", "no column 'txt'", "did you mean 'text'?"),
        lambda p: p.job(prompt="prompt: {text: txt}")),
    "column in no row, id": Wrong(78, ("line 3", "input.id", "no column 'Id'", "id, text", "did you mean 'id'?"),
        lambda p: p.job(input=from_file("rows.jsonl", ", id: Id"))),
    "column in no row, id and template": Wrong(78, ("2 mistakes", "line 3", "input.id", "no column 'ident'", "line 4",
        "prompt", "no column 'txet'"), lambda p: p.job(input=from_file("rows.jsonl", ", id: ident"),
        prompt='prompt: {user: "{{ txet }}"}')),
    "column in no row, parameter": Wrong(78, ("line 5", "sampling.from_columns", "no column 'warmth'", "id, text"),
        lambda p: p.job(sampling="sampling: {from_columns: {temperature: warmth}}")),
    "column in no row, output": Wrong(78, ("line 6", "output.columns", "no column 'txt'", "did you mean 'text'?"),
        lambda p: p.job(output="output: {path: out/res, columns: [txt]}")),
    "column in no row, Parquet output": Wrong(78, ("line 6", "output.columns", "no column 'txt'"),
        lambda p: (p.parquet("rows.parquet"), p.job(input=from_file("rows.parquet"),
        output="output: {path: out/res, columns: [txt]}"))),
    "no chat template": Wrong(78, ("line 4", "prompt.user", "no chat template", "prompt.text"),
        lambda p: without_template(p)),
    "no chat template for messages": Wrong(78, ("line 4", "prompt.messages", "no chat template"),
        lambda p: (without_template(p), p.job(prompt="prompt: {messages: text}"))),
    "column in no row, CSV template": Wrong(78, ("line 4", "prompt", "no column 'text'", "id, body"),
        lambda p: (p.bytes(b"id,body\n1,x\n", "rows.csv"), p.job(input=from_file("rows.csv")))),
    "column in no row, query": Wrong(78, ("line 4", "prompt", "no column 'text'", "words"),
        from_sql("select 'x' as words")),
    "column in no row of many": Wrong(78, ("line 6", "output.columns", "no column 'note'"),
        lambda p: (p.rows(*ROWS * 60), p.job(output="output: {path: out/res, columns: [note]}"))),
    "not Arrow": Wrong(65, ("rows.arrow", "not an Arrow file"), lambda p: (p.bytes(b"id,text\n1,x\n", "rows.arrow"),
        p.job(input=from_file("rows.arrow")))),
    "a workbook": Wrong(65, ("rows.xlsx", "Excel", "save the sheet as CSV"),
        lambda p: (p.bytes(b"PK\x03\x04", "rows.xlsx"), p.job(input=from_file("rows.xlsx")))),
    "CSV without a header": Wrong(65, ("rows.csv", "'x' twice", "read_csv"),
        lambda p: (p.bytes(b"x,x\n", "rows.csv"), p.job(input=from_file("rows.csv")))),
    "neither prompt nor requests": Wrong(78, ("prompt", "is missing"),
        lambda p: (p.rows({"a": 1}, name="in/a.jsonl"), p.job(prompt="", input=from_file("in")))),
    "too many bad rows": Wrong(65, ("5 of 20 rows are errors", "on_error.max_error_rate", "1.00%", "5 × bad_json",
        "rows.jsonl row 15"), lambda p: p.rows(*ROWS[:15], *[b"{not json"] * 5), verbs=("run", "validate"),
        engine=FAKE),
}  # fmt: skip


def other_job(p: Place) -> None:
    manifest = Manifest("weekly", "x", (), 1, "0" * 16, 0, 0, 0, 0, (), ())
    p.bytes(json.dumps(manifest.to_json()).encode(), f"out/res/{MANIFEST_NAME}")


def strangers(p: Place) -> None:
    p.results.mkdir(parents=True)
    (p.results / "thesis.txt").write_text("precious")


def linked(p: Place, name: str) -> None:
    """Put a link to a folder there."""
    path = p.folder / name
    path.parent.mkdir()
    path.symlink_to(p.folder)


DESTINATIONS = {
    "strangers' files": Wrong(73, ("out/res", "'thesis.txt'", "move them away"), strangers),
    "strangers' files, --replace": Wrong(73, ("out/res", "'thesis.txt'"), strangers, ("--replace",), ("run",)),
    "a file": Wrong(73, ("out/res", "is a file", "folder"), lambda p: p.bytes(b"x", "out/res")),
    "result of another job": Wrong(73, ("out/res", "'weekly'", "'nightly'", "--replace"), other_job, (),
        ("run", "validate")),
    "a file on the way": Wrong(73, ("out: is a file", "output.path"), lambda p: p.bytes(b"x", "out")),
    "state of a newer version": Wrong(74, ("state.json", "format 9", "remove the folder"),
        lambda p: p.bytes(b'{"format": 9}', "out/.batchinfer-res/state.json")),
    "a linked report": Wrong(73, ("res-report: is a symbolic link", "remove the link"),
        lambda p: linked(p, "out/res-report")),
    "a report in a file": Wrong(73, ("res-report: is a file", "move it away"),
        lambda p: p.bytes(b"x", "out/res-report")),
    "a linked state": Wrong(73, (".batchinfer-res: is a symbolic link", "remove the link"),
        lambda p: linked(p, "out/.batchinfer-res")),
    "a store in a file": Wrong(74, ("cache: is a file",), lambda p: (p.bytes(b"x", "cache"),
        p.job("cache: {path: cache}"))),
    "unreadable manifest": Wrong(73, (MANIFEST_NAME, "move the folder away"),
        lambda p: p.bytes(b"\x00", f"out/res/{MANIFEST_NAME}")),
}  # fmt: skip
REFUSED = JOB_FILES | CHECKPOINTS | INPUTS | DESTINATIONS


# What `preview` and `run` say of the rest is tried where everything is: each kind of mistake is found in one place
WITH_ALL_VERBS = (
    "unknown key", "several mistakes", "template syntax", "no job file", "too long for the model", "--set unknown key",
    "auto_map", "missing tensor", "damaged tokenizer", "chat template with a syntax error", "config.json is a pipe",
    "truncated gzip", "differing schemas", "missing file", "no rows", "failing query", "no space", "no chat template",
    "column in no row, id and template", "too many bad rows", "result of another job", "a store in a file",
)  # fmt: skip


def marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in WITH_ALL_VERBS else [pytest.mark.slow]


def each(cases: dict[str, Wrong]) -> Iterator[Any]:
    """Each case with each verb that is not tried beside another one in `test_validate_and_run_agree`."""
    for name, case in cases.items():
        for verb in case.verbs:
            if "validate" not in case.verbs or verb == "preview":
                yield pytest.param(name, verb, marks=marks(name) if "validate" in case.verbs else [])


def clear(message: str) -> None:
    """What no message may hold: Python's insides, or nothing at all."""
    first, _, rest = message.partition("\n")
    message = rest if ": reads " in first else message  # the first line of a run, whose job file is right
    assert message.startswith("batchinfer: ")
    for word in ("Traceback", "a bug in", "pydantic", "errors.pydantic", "BatchInferError", "<class"):
        assert word not in message


@pytest.mark.parametrize(("name", "verb"), list(each(REFUSED)))
def test_refused(name: str, verb: str, place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch) -> None:
    case = REFUSED[name]
    monkeypatch.chdir(place.folder)
    case.arrange(place)
    before = place.published()
    ended = cli_of(case.engine)(verb, "job.yaml", *case.arguments)
    refused(case, ended)
    assert place.published() == before


def refused(case: Wrong, ended: Ended) -> None:
    print(ended.code, ended.err)
    assert ended.code == case.code, ended.err
    for word in case.words:
        assert word in ended.err
    clear(ended.err)
    assert ended.out == ""


VALIDATED = [name for name, case in REFUSED.items() if "validate" in case.verbs]


# Found by processes that import transformers, as tests of models and tokenizers have it, too
IN_PROCESSES = ("a tokenizer that cannot be converted", "unsupported architecture")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in IN_PROCESSES))
        for name in VALIDATED
        if name not in WITH_ALL_VERBS
    ],
)
def test_validate_refuses(name: str, place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch) -> None:
    case = REFUSED[name]
    monkeypatch.chdir(place.folder)
    case.arrange(place)
    refused(case, cli_of(NO_ENGINE)("validate", "job.yaml", *case.arguments))


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in VALIDATED])
def test_validate_and_run_agree(
    name: str, place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `run` refuses, `validate` refuses with the same words; it writes nothing."""
    case = REFUSED[name]
    monkeypatch.chdir(place.folder)
    case.arrange(place)
    before = set(place.folder.rglob("*"))
    command_line = cli_of(case.engine)
    checked = command_line("validate", "job.yaml", *case.arguments)
    assert set(place.folder.rglob("*")) == before
    published = place.published()
    ran = command_line("run", "job.yaml", *case.arguments)
    refused(case, ran)
    assert place.published() == published
    assert (checked.code, checked.out) == (case.code, ""), checked.err
    # `run` may also say how to see the rows that it has stored. Other processes may use the disk, too
    free = re.compile(r"[\d.]+ GiB are free")
    assert free.sub("", checked.err) in free.sub("", ran.err)


RIGHT: dict[str, Callable[[Place], object]] = {
    "a column in a later row only": lambda p: (p.rows(*ROWS * 60, {"id": "last", "text": "x", "note": "y"}),
        p.job(output="output: {path: out/res, columns: [note]}")),
    "a template that does without": lambda p: p.job(
        prompt="prompt: {user: \"{% if text == 'odd' %}{{ more }}{% else %}{{ text }}{% endif %}\"}"
    ),
    "few bad rows": lambda p: (p.rows(*ROWS, b"{no"), p.job("on_error: {max_error_rate: 0.1}")),
    "as it is": lambda p: p.job(),
    "no rows": lambda p: (p.rows(), p.job(input=from_file("rows.jsonl", ", id: id, allow_empty: true"))),
    "a result of an older run": lambda p: p.job(output="output: {path: out/new}"),
    "CSV": lambda p: (p.bytes(b"id,text\nr,x\n", "rows.csv"), p.job(input=from_file("rows.csv", ", id: id"))),
    "a query": from_sql("select text from 'rows.jsonl' -- all of them"),
    "a text prompt without a chat template": lambda p: (without_template(p), p.job(prompt="prompt: {text: text}")),
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", first_of(RIGHT, 5))
def test_validate_and_run_agree_on_what_is_right(name: str, place: Place, cli_of: CliOf) -> None:
    RIGHT[name](place)
    command_line = cli_of()
    for verb in ("validate", "preview", "run"):
        ended = command_line(verb, place.folder / "job.yaml")
        assert ended.code == 0, (verb, ended.err)


def test_validate_tells_of_bad_rows_within_the_budget(place: Place, cli_of: CliOf) -> None:
    place.rows(*ROWS, b"{no")
    place.job("on_error: {max_error_rate: 0.1}")
    ended = cli_of()("validate", place.folder / "job.yaml")
    assert "1 of all 21 would become error rows" in ended.out
    assert "1 × bad_json, first rows.jsonl row 20" in ended.out


def test_validate_reads_the_first_rows_of_every_file(place: Place, cli_of: CliOf) -> None:
    """A long input is not read to its end: its error rate is not known, and what was found is told."""
    place.rows(*ROWS * 50, name="in/a.jsonl")
    place.rows(b"{no", *ROWS, name="in/b.jsonl")
    place.job("on_error: {max_error_rate: 0}", input=from_file("in", ", id: id"))
    run = cli_of()
    checked = run("validate", place.folder / "job.yaml")
    assert checked.code == 0
    assert "1 of the first 512 of each file, 533 in all, would become error rows" in checked.out
    assert "in/b.jsonl row 0" in checked.out
    assert run("run", place.folder / "job.yaml").code == 65


@pytest.mark.slow
def test_a_column_that_looks_like_a_parameter_is_told_of(place: Place, cli_of: CliOf) -> None:
    place.rows(*({**row, "temperature": 23.5, "seed": 1} for row in ROWS))
    place.job(output="output: {path: out/res, columns: [seed]}")
    run = cli_of()
    for verb in ("validate", "preview", "run"):
        ended = run(verb, place.folder / "job.yaml")
        assert "the input has the column temperature, but the job ignores it" in ended.out + ended.err


def test_an_empty_file_is_an_empty_result_where_the_job_allows_it(place: Place, cli_of: CliOf) -> None:
    place.rows()
    place.job(input=from_file("rows.jsonl", ", allow_empty: true"))
    ended = cli_of(NO_ENGINE)("run", place.folder / "job.yaml", "--json")
    assert (ended.code, json.loads(ended.out)["rows"]) == (0, 0)
    assert place.table() == []


def test_a_held_lock(place: Place, cli_of: CliOf) -> None:
    place.bytes(b"4711\n", "out/.batchinfer-res/lock")
    with (place.state / "lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = cli_of(NO_ENGINE)("run", place.folder / "job.yaml")
    assert ended.code == 75
    assert "process 4711" in ended.err
    assert "try again" in ended.err
    clear(ended.err)


# What is typed wrong: 2, and where help is.
USAGE = {
    "no such verb": (("walk",), "walk"),
    "no such option": (("run", "job.yaml", "--fast"), "--fast"),
    "no rows": (("run", "job.yaml", "--limit", "0"), "--limit"),
    "a dry run": (("run", "job.yaml", "--dry-run"), "`batchinfer plan JOB.YAML` says what a run would do"),
    "not a number": (("preview", "job.yaml", "--rows", "few"), "--rows"),
    "SQL that DuckDB refuses": (("query", "out/res", "selec 1"), "selec"),
    "a job is there already": (("init", "."), "job.yaml: exists already"),
}


@pytest.mark.parametrize("name", USAGE)
def test_usage(name: str, place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    place.rows()
    run = cli_of(NO_ENGINE)
    if name.startswith("SQL"):
        place.job(output="output: {path: out/res}")
        assert run("run", "job.yaml", "-q", "--set", "input.allow_empty=true").code == 0
    arguments, word = USAGE[name]
    ended = run(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert word in ended.err
    clear(ended.err)


def separate(
    place: Place, *arguments: str, module: str = "batchinfer", **env: str
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a user's shell runs it."""
    command = [sys.executable, "-m", module, *arguments]
    return warm_commands.run(
        command,
        cwd=place.folder,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize("name", first_of(("truncated gzip", "several mistakes", "auto_map"), 1))
def test_the_exit_status(name: str, place: Place) -> None:
    case = REFUSED[name]
    case.arrange(place)
    ended = separate(place, "run", "job.yaml")
    assert ended.returncode == case.code
    assert all(word in ended.stderr for word in case.words), ended.stderr
    clear(ended.stderr)
    assert ended.stdout == ""
    assert not place.results.exists()


def test_a_pipe_is_no_input(place: Place) -> None:
    """In a process of its own: opening a pipe that nobody writes to never ends."""
    os.mkfifo(place.folder / "pipe.jsonl")
    place.job(input=from_file("pipe.jsonl"))
    ended = separate(place, "run", "job.yaml")
    assert ended.returncode == 66
    assert "pipe.jsonl" in ended.stderr
    assert "not a regular file" in ended.stderr


# One bad thing a row: (line, error code, error class).
GOOD_ROW = {"id": "good", "text": "fine"}
Bad = tuple[object, str, str]
TEMPLATE = (
    "{% if times is defined %}{{ text * times }}{% elif divisor is defined %}{{ 1 // divisor }}"
    "{% else %}{{ text }}{% endif %}"
)


def with_field(**fields: object) -> dict[str, object]:
    return {"text": "fine", **fields}


OWN = ("max_tokens", "min_tokens", "temperature", "top_p", "seed", "stop", "stop_token_ids", "ignore_eos")
BAD_ROWS: list[Bad] = [
    (b'{"id": "a", "text": "\xff"}', "bad_utf8", "input"),
    (b'{"id": "b", "text": "\\ud83d"}', "lone_surrogate", "input"),
    (b'{"id": "c", "text": "open', "bad_json", "input"),
    (b"{'id': 'c'}", "bad_json", "input"),
    (b'{"text": "x"} {"text": "y"}', "bad_json", "input"),
    (b'{"text": ' + b"9" * 5000 + b"}", "bad_json", "input"),
    (b'{"text": NaN}', "nan", "input"),
    (b'{"text": -Infinity}', "nan", "input"),
    (b'{"text": 1e999}', "nan", "input"),
    (b'{"text": "x", "text": "y"}', "duplicate_keys", "input"),
    (b'{"text": ' + b"[" * 65 + b"]" * 65 + b"}", "nesting", "input"),
    (b'{"text": "' + b"x" * 70_000 + b'"}', "line_too_long", "input"),
    (b'["text"]', "not_an_object", "input"),
    (b"null", "not_an_object", "input"),
    ({"id": "no-text"}, "template_error", "input"),
    ({"id": "null", "text": None}, "null_in_template", "input"),
    ({"text": {"a": 1}, "times": 2}, "template_error", "input"),
    (with_field(divisor=0), "template_error", "input"),
    (with_field(times=2_000_000), "text_too_long", "policy"),
    (with_field(times=10**11), "template_memory", "resource"),
    ({"text": "x" * 600}, "prompt_too_long", "policy"),
    (with_field(max_tokens=0), "bad_parameter", "input"),
    (with_field(max_tokens=-3), "bad_parameter", "input"),
    (with_field(max_tokens=1.5), "bad_parameter", "input"),
    (with_field(max_tokens=True), "bad_parameter", "input"),
    (with_field(min_tokens=9), "bad_parameter", "input"),
    (with_field(temperature=-0.1), "bad_parameter", "input"),
    (with_field(temperature="hot"), "bad_parameter", "input"),
    (with_field(top_p=1.01), "bad_parameter", "input"),
    (with_field(top_p=0), "bad_parameter", "input"),
    (with_field(seed=2**63), "bad_parameter", "input"),
    (with_field(stop=[""]), "bad_parameter", "input"),
    (with_field(stop=list("abcdefghijklmnopq")), "too_many_stops", "input"),
    (with_field(stop_token_ids=[-1]), "bad_parameter", "input"),
    (with_field(ignore_eos="no"), "bad_parameter", "input"),
    ({"id": "good", "text": "again"}, "duplicate_custom_id", "input"),
]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def request(body: object, url: str = CHAT, **more: object) -> dict[str, object]:
    return {"custom_id": "x", "method": "POST", "url": url, "body": body, **more}


def chat(*messages: object, **fields: object) -> dict[str, object]:
    return request({"model": "m", "messages": list(messages), **fields})


def says(content: object, role: str = "user") -> dict[str, object]:
    return {"role": role, "content": content}


BAD_REQUESTS: list[Bad] = [
    (request({"model": "m"}), "prompt_missing", "input"),
    (request({"messages": None}), "prompt_missing", "input"),
    (request({"messages": "hello"}), "prompt_type", "input"),
    (chat(), "empty_messages", "input"),
    (chat("hello"), "prompt_type", "input"),
    (chat(says("hello", "wizard")), "unknown_role", "input"),
    (chat({"content": "hello"}), "unknown_role", "input"),
    (chat(says(7)), "prompt_type", "input"),
    (chat(says(None)), "prompt_type", "input"),
    (chat(says([{"type": "image_url", "image_url": {"url": "x"}}])), "unsupported_content", "input"),
    (chat(says("hi"), n=2000), "n_over_limit", "input"),
    (chat(says("hi"), temprature=1), "unknown_field", "input"),
    (chat(says("hi"), tools=[{"type": "function"}]), "bad_parameter", "input"),
    (chat(says("hi"), response_format={"type": "json_schema"}), "bad_parameter", "input"),
    (chat(says("hi"), stream=True), "stream", "input"),
    (chat(says("hi"), max_completion_tokens=0), "bad_parameter", "input"),
    (request({"prompt": None}, TEXT), "prompt_missing", "input"),
    (request({"prompt": 7}, TEXT), "prompt_type", "input"),
    (request({"prompt": ""}, TEXT), "empty_prompt", "input"),
    (request({"prompt": [1, 260]}, TEXT), "token_id_out_of_range", "input"),
    (request({"prompt": [-1]}, TEXT), "token_id_out_of_range", "input"),
    (request({"prompt": ["a"]}, TEXT), "prompt_type", "input"),
    (request({"prompt": [5] * 512}, TEXT), "prompt_too_long", "policy"),
    (request({}, "/v1/embeddings"), "prompt_missing", "input"),
    (request({"input": "hi"}, "/v1/moderations"), "bad_request", "input"),
    (request([]), "bad_request", "input"),
    ({**chat(says("hi")), "method": "GET"}, "bad_request", "input"),
    ({**chat(says("hi")), "priority": 1}, "unknown_field", "input"),
    ({"custom_id": "x", "body": {}}, "bad_request", "input"),
]


def one_after_another(good: object, bad: list[Bad]) -> list[object]:
    """A good row, then each bad one followed by a good one."""
    return [good, *(row for line, _, _ in bad for row in (line, good))]


def check_errors(place: Place, bad: list[Bad]) -> None:
    table = place.table()
    assert [row["row_id"] for row in table] == list(range(2 * len(bad) + 1))
    assert [row["row_index"] for row in table] == list(range(2 * len(bad) + 1))
    assert {row["status"] for row in table[::2]} == {"ok"}
    assert all(row["generated_text"] and row["error_code"] is None for row in table[::2])
    found = [(row["status"], row["error_code"], row["error_class"]) for row in table[1::2]]
    assert found == [("error", code, kind) for _, code, kind in bad]
    for row in table[1::2]:
        assert row["generated_text"] is row["finish_reason"] is row["completion_tokens"] is None
        assert 0 < len(row["error_message"].encode()) <= 2048
        assert row["retryable"] is False
        print(row["row_id"], row["error_code"], row["error_message"])


@pytest.mark.usefixtures("render_processes")
def test_bad_rows(place: Place, cli_of: CliOf) -> None:
    """Each costs itself, and nothing else."""
    good = iter(range(1000))
    rows = [
        {"id": "good" if row == 0 else f"good-{next(good)}", "text": "fine"} if line is GOOD_ROW else line
        for row, line in enumerate(one_after_another(GOOD_ROW, BAD_ROWS))
    ]
    place.rows(*rows)
    place.job(
        "on_error: {max_error_rate: 1}",
        input="input: {path: rows.jsonl, id: id, unique_ids: true, max_line_bytes: 64KiB}",
        sampling=f"sampling: {{max_tokens: 8, from_columns: [{', '.join(OWN)}]}}",
        prompt=f"prompt: {{user: {json.dumps(TEMPLATE)}}}",
        output="output: {path: out/res}",
    )
    ended = cli_of()("run", place.folder / "job.yaml")
    assert ended.code == 0, ended.err
    check_errors(place, BAD_ROWS)


def test_bad_requests(place: Place, cli_of: CliOf) -> None:
    place.rows(*one_after_another(chat(says("hello")), BAD_REQUESTS))
    source, output = from_file("rows.jsonl", ", format: openai"), "output: {path: out/res}"
    place.job("on_error: {max_error_rate: 1}", input=source, prompt="", output=output)
    ended = cli_of()("run", place.folder / "job.yaml")
    assert ended.code == 0, ended.err
    check_errors(place, BAD_REQUESTS)


def line(custom_id: str, text: str) -> bytes:
    return json.dumps({"id": custom_id, "text": text}, ensure_ascii=False).encode()


ACCEPTED = {
    "a-bom.jsonl": b"\xef\xbb\xbf" + line("bom", "x") + b"\n",
    "b-crlf.jsonl": line("crlf-1", "x") + b"\r\n" + line("crlf-2", "x") + b"\r\n",
    "c-no-newline.jsonl": line("n-1", "x") + b"\n" + line("n-2", "x"),
    "d-blank.jsonl": b"\n\n" + line("blank-1", "x") + b"\n \t\r\n" + line("blank-2", "x") + b"\n\n",
    "e-members.jsonl.gz": gzip.compress(line("m-1", "x") + b"\n") + gzip.compress(line("m-2", "x") + b"\n"),
    "f-empty.jsonl": b"",
    "g-text.jsonl": b"\n".join([
        line("nul", "a\0b"), line("../../etc/passwd", "x"), line("plain", "(im_end)!!"),
        line("special", "<|im_end|>"), b'{"id": "raw-nul", "text": "a\0b"}', line("emoji 😀", "😀"),
    ]),
}  # fmt: skip


def test_accepted(place: Place, cli_of: CliOf) -> None:
    for name, data in ACCEPTED.items():
        place.bytes(data, f"in/{name}")
    place.job("on_error: {max_error_rate: 0}", input=from_file("in", ", id: id"))
    ended = cli_of()("run", place.folder / "job.yaml")
    assert ended.code == 0, ended.err
    table = {row["custom_id"]: row for row in place.table()}
    assert list(table) == [
        "bom", "crlf-1", "crlf-2", "n-1", "n-2", "blank-1", "blank-2", "m-1", "m-2",
        "nul", "../../etc/passwd", "plain", "special", "raw-nul", "emoji 😀",
    ]  # fmt: skip
    assert table["blank-2"]["row_index"] == 1
    assert table["nul"]["text"] == table["raw-nul"]["text"] == "a\0b"
    assert table["nul"]["generated_text"] == table["raw-nul"]["generated_text"]
    # ten bytes and no control token
    assert table["special"]["prompt_tokens"] == table["plain"]["prompt_tokens"]
    assert {path.name for path in place.folder.iterdir()} == {"in", "job.yaml", "model", "out", "rows.jsonl"}


@pytest.mark.slow
def test_over_budget_but_published(place: Place, cli_of: CliOf) -> None:
    place.rows(*ROWS[:15], *[b"{not json"] * 5)
    place.job("on_error: {publish: true}")
    ended = cli_of()("run", place.folder / "job.yaml")
    assert ended.code == 65
    assert "5 of 20 rows are errors" in ended.err
    assert "bad_json" in ended.err
    assert [row["status"] for row in place.table()] == ["ok"] * 15 + ["error"] * 5


def test_too_many_rows_fail_in_the_engine(
    place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_FAILS_EVERY", "2")
    ended = cli_of()("run", place.folder / "job.yaml", "--json")
    assert ended.code == 65
    assert "fake_failure" in ended.err
    assert json.loads(ended.out)["exit_code"] == 65
    assert place.published() == {}


def test_another_jobs_result_is_replaced_when_asked(place: Place, cli_of: CliOf) -> None:
    other_job(place)
    run = cli_of()
    assert run("run", place.folder / "job.yaml").code == 73
    assert run("run", place.folder / "job.yaml", "--replace").code == 0
    assert len(place.table()) == len(ROWS)


@pytest.mark.slow
def test_the_engine_dies(place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again: 69; what it had finished is stored, and the same command does the rest."""
    place.job("commit: {rows: 1}")
    run = cli_of()
    monkeypatch.setenv("FAKE_ENGINE_DIES_AFTER_ROWS", "8")
    monkeypatch.setenv("FAKE_ENGINE_LOG", str(place.folder / "log"))
    monkeypatch.setenv("FAKE_ENGINE_BATCH", "4")
    monkeypatch.setenv("FAKE_ENGINE_DELAY_S", "0.2")
    ended = run("run", place.folder / "job.yaml", "--json")
    assert ended.code == 69
    assert "exit status 3" in ended.err
    assert "the same command resumes" in ended.err
    opening, plan, *running, message = ended.err.splitlines(keepends=True)
    assert "nightly: reads" in opening
    assert "nightly: plan: 20 rows" in plan
    assert any("starting a new one" in line for line in running), "a slow run logs its progress, too"
    clear(message)
    assert place.published() == {}
    monkeypatch.delenv("FAKE_ENGINE_DIES_AFTER_ROWS")
    again = run("run", place.folder / "job.yaml", "--json")
    assert again.code == 0, again.err
    told = json.loads(again.out)
    assert told["reused_requests"] >= 4
    assert told["reused_requests"] + told["computed_requests"] == len(ROWS)


def test_the_input_changes_meanwhile(place: Place, cli_of: CliOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE_MEDDLES_WITH", str(place.folder / "rows.jsonl"))
    ended = cli_of()("run", place.folder / "job.yaml")
    assert ended.code == 65
    assert "rows.jsonl" in ended.err
    assert "changed" in ended.err
    assert place.published() == {}


def test_the_kv_cache_does_not_fit(place: Place, cli_of: CliOf) -> None:
    edit_json(place.own_model() / "config.json", max_position_embeddings=100_000)
    place.job("engine: {device: cpu, kv_memory: 1MiB}", sampling="sampling: {max_tokens: 50000}")
    ended = cli_of(ENGINE)("run", place.folder / "job.yaml")
    assert ended.code == 71
    assert "the KV cache of the longest row" in ended.err
    assert "engine.kv_memory" in ended.err
    assert "Traceback" not in ended.err
    assert place.published() == {}


@pytest.mark.skipif(bool(nvidia_gpus()), reason="there is a GPU")
def test_no_gpu(place: Place, cli_of: CliOf) -> None:
    run = cli_of(NO_ENGINE)
    for verb in ("run", "validate", "preview"):
        ended = run(verb, place.folder / "job.yaml", "--set", "engine.device=cuda")
        assert ended.code == 69
        assert "engine.device" in ended.err
        assert "device: cpu" in ended.err
        assert "Traceback" not in ended.err
        assert place.published() == {}


@pytest.mark.slow
def test_the_disk_is_full(place: Place) -> None:
    """As far as that can be had without a disk: no file may grow beyond 1 MiB. What one chunk of rows takes is less."""
    place.rows(*({"id": f"r{i}", "text": f"{i:099d}"} for i in range(4000)))
    ended = limited(place, 1 << 20)
    assert ended.returncode == 74, ended.stderr
    assert ".batchinfer-res" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert place.published() == {}
    assert separate(place, "run", "job.yaml", module="tests.fake_cli").returncode == 0
    assert len(place.table()) == 4000


def limited(place: Place, file_bytes: int) -> subprocess.CompletedProcess[str]:
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({file_bytes}, {file_bytes}));"
        "import sys; sys.argv[1:] = ['run', 'job.yaml']; from tests.fake_cli import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=place.folder, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_template_that_never_ends(place: Place, cli_of: CliOf) -> None:
    loop = "".join(f"{{% for {name} in range(99999) %}}" for name in "ijk") + "{% endfor %}" * 3
    place.job(prompt=f"prompt: {{user: {json.dumps(loop + '{{ text }}')}}}")
    ended = cli_of(NO_ENGINE)("run", place.folder / "job.yaml")
    assert ended.code == 78
    assert "prompt" in ended.err
    assert "loop for ever" in ended.err
