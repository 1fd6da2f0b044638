"""Ingest: rows per second, and the growth of memory of all processes."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from pyarrow import csv

from batchinfer.input.tokenizer.tokenizer import Tokenizer as LoadedTokenizer
from batchinfer.store.index.ingest import IngestProgress, ingest
from tests.batchinfer.store.index.ingest_kit import SPECIALS, checkpoint, make_job, options
from tests.speed.processes import Growth
from tests.suite.section import BenchSection, Part, Result

SAMPLE_S = 0.1
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "we",
    "count",
    "to",
    "forty-two",
]
FIRST_ID = 10_000_000  # all ids have the same number of digits


def texts(rows: int, characters: int) -> Iterator[str]:
    """Yield different texts of words, half to one and a half times `characters` long."""
    source = random.Random(0)
    for row in range(rows):
        words = max(1, int(characters * source.uniform(0.5, 1.5)) // 6)
        yield " ".join([f"{row:08x}", *source.choices(WORDS, k=words)])


def record(kind: str, row: int, text: str) -> dict[str, Any]:
    """Return one input row for this kind of prompt."""
    if kind == "openai":
        body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 16}
        return {"custom_id": f"id-{row}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    chat = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": text}]
    return {"id": row, "text": text, "label": "x"} | ({"messages": chat} if kind == "messages" else {})


PROMPTS: dict[str, dict[str, Any] | None] = {
    "user": {"user": "{{ text }}"},
    "template": {"system": "Answer in one word.", "user": "Classify: {{ text }}"},
    "text": {"text": "text"},
    "messages": {"messages": "messages"},
    "schema": {"user": "{{ text }}"},
    "openai": None,
}
SCHEMA = {"type": "object", "properties": {"answer": {"enum": ["a", "b"]}}, "required": ["answer"]}


def write_rows(path: Path, kind: str, rows: int, characters: int) -> None:
    """Write a file in the format of its name, in batches of rows."""
    lines = enumerate(texts(rows, characters), FIRST_ID)
    records = (record(kind, row, text) for row, text in lines)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(one) + "\n" for one in records)
        return
    schema = pa.Table.from_pylist([record(kind, FIRST_ID, "")]).schema
    make = csv.CSVWriter if path.suffix == ".csv" else pq.ParquetWriter
    with make(path, schema) as writer:
        while batch := list(islice(records, 20_000)):
            writer.write_table(pa.Table.from_pylist(batch, schema))


def big_checkpoint(folder: Path, vocab: int = 32_000) -> None:
    """Write a checkpoint whose tokenizer works like a large model's, trained on made-up words."""
    source = random.Random(1)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    weights = [1 / (at + 2) for at in range(len(letters))]
    words = ["".join(source.choices(letters, weights, k=source.randint(2, 10))) for _ in range(60_000)]
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(GPT4), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, show_progress=False, initial_alphabet=alphabet, special_tokens=list(SPECIALS)
    )
    made.train_from_iterator((" ".join(source.choices(words, k=12)) for _ in range(40_000)), trainer)
    checkpoint(folder)
    made.save(str(folder / "tokenizer.json"))


GPT4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def tokenizer_alone(folder: Path, rows: int, characters: int) -> float:
    """Return the CPU seconds of the tokenizer for the same texts, 512 at a time, in one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rust = LoadedTokenizer.load(folder / "model").rust
    source, start = texts(rows, characters), 0.0
    while batch := list(islice(source, 512)):
        before = time.process_time()
        rust.encode_batch_fast(batch, add_special_tokens=False)
        start += time.process_time() - before
    return start


def resident_bytes() -> int:
    """Return the memory of this process and its descendants."""
    me, found = psutil.Process(), 0
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.Error):  # it has ended
            found += process.memory_info().rss
    return found


def measure(
    folder: Path,
    rows: int,
    characters: int,
    form: str = "jsonl",
    kind: str = "template",
    workers: int | None = None,
    carry: bool = True,
) -> dict[str, Any]:
    """Ingest a file once.

    The checkpoint exists. `steady_rows_per_s`: from the first fifth to the last tenth, without start and end of the
    processes.
    """
    path = folder / f"rows.{form}"
    write_rows(path, kind, rows, characters)
    named = {"columns": ("id", "label") if carry else (), "id": "id"}
    job = make_job(
        folder, prompt=PROMPTS[kind], path=str(path), **({"format": "openai"} if kind == "openai" else named)
    )
    if kind == "schema":
        output = job.output.model_copy(update={"json_schema": json.dumps(SCHEMA)})
        job = job.model_copy(update={"output": output})
    start, before, seen = time.perf_counter(), _cpu(), list[tuple[float, int]]()
    given = options(workers=workers, max_model_len=32768, vocab_size=1 << 20)

    def progress(at: IngestProgress) -> None:
        if 0.2 * rows < at.rows < 0.9 * rows:
            seen.append((time.perf_counter(), at.rows))

    with Growth(resident_bytes, SAMPLE_S) as memory:
        tokenizer = LoadedTokenizer.load(folder / "model")
        index = ingest(job, tokenizer, given, folder / "scratch", progress)
    seconds, cpu = time.perf_counter() - start, [now - then for now, then in zip(_cpu(), before, strict=True)]
    (began, first), (ended, last) = (seen[0], seen[-1]) if len(seen) > 1 else ((0, 0), (1, 0))
    return {
        "rows": rows,
        "error_rows": index.error_rows,
        "tokens": index.total_tokens,
        "file_bytes": path.stat().st_size,
        "ingest_s": seconds,
        "rows_per_s": rows / seconds,
        "steady_rows_per_s": (last - first) / (ended - began),
        "parent_us_per_row": 1e6 * cpu[0] / rows,
        "workers_us_per_row": 1e6 * cpu[1] / rows,
        "rows_per_cpu_second": rows / sum(cpu),
        "peak_mib": memory.most >> 20,
    }


def _cpu() -> list[float]:
    """Return CPU seconds of this thread and of ended children, without the thread that measures memory."""
    found = os.times()
    return [time.thread_time(), found.children_user + found.children_system]


def parts(section: BenchSection) -> list[Part]:
    """Return a part for each format, kind of prompt, and number of workers."""
    given = section.given
    cases = product(given.format, given.kind, given.workers)
    return [(" ".join(map(str, case)), partial(_ingested, section, *case)) for case in cases]


@cache
def _alone_s(folder: Path, vocab: int, rows: int, characters: int) -> float:
    """Write the checkpoint and return the CPU seconds of its tokenizer per row."""
    big_checkpoint(folder / "model", vocab) if vocab else checkpoint(folder / "model")
    return tokenizer_alone(folder, rows, characters) / rows


def _ingested(section: BenchSection, form: str, kind: str, workers: int) -> Result:
    """Ingest once. `tokenizer_share` is the tokenizer's share of all CPU time."""
    given = section.given
    alone = _alone_s(section.place, given.vocab, min(given.rows, 50_000), given.characters)
    found = measure(section.place, given.rows, given.characters, form, kind, workers, not given.bare)
    shares = {"tokenizer_share": alone * found["rows_per_cpu_second"], "tokenizer_alone_s": alone}
    return Result(f"{form}, {kind}, {workers} workers", metrics=found | shares)
