"""Measures ingest: rows a second and by how much the memory of all its processes together grows.

    python tests/batchinfer/store/index/ingest_speed.py --rows 50000 --format jsonl csv parquet --kind user messages

Every line is JSON. CPU times are of the parent and of its workers, start included; `share` is that of the tokenizer
alone in all of it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from batchinfer.input.prompts import render_worker
from batchinfer.input.tokenizer.tokenizer import Tokenizer as LoadedTokenizer
from batchinfer.store.index.ingest import ingest
from tests.batchinfer.store.index.ingest_kit import SPECIALS, checkpoint, make_job, options


class PeakMemory:
    """Samples the resident memory of this process and its children every 100 ms: what is added to that at the start."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._before = _all_resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            self.peak_bytes = max(self.peak_bytes, _all_resident() - self._before)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def _all_resident() -> int:
    me = psutil.Process()
    return sum(map(_resident, [me, *me.children(recursive=True)]))


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it ended meanwhile
        return 0


WORDS = (
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
)
FIRST_ID = 10_000_000  # all ids have as many digits


def texts(rows: int, characters: int, equal: bool = False) -> Iterator[str]:
    """Texts of words, half to one and a half times as long as asked for unless they are to be `equal` in length; no two
    of them are alike."""
    source = random.Random(0)
    for row in range(rows):
        if equal:
            yield f"{row:08x} " + (" ".join(WORDS) + " ") * (characters // 80)
            continue
        words = max(1, int(characters * source.uniform(0.5, 1.5)) // 6)
        yield " ".join([f"{row:08x}", *source.choices(WORDS, k=words)])


def record(kind: str, row: int, text: str) -> dict[str, Any]:
    """One row of the input, for this kind of prompt."""
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


def write_rows(path: Path, kind: str, rows: int, characters: int, equal: bool = False) -> None:
    """A file of the format that its name tells."""
    lines = enumerate(texts(rows, characters, equal), FIRST_ID)
    records = (record(kind, row, text) for row, text in lines)
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(one) + "\n" for one in records)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["id", "text", "label"])
            writer.writerows([one["id"], one["text"], one["label"]] for one in records)
    else:
        write_table(path, records)


def write_table(path: Path, records: Iterator[dict[str, Any]]) -> None:
    """Parquet, some rows at a time."""
    writer = None
    while batch := list(islice(records, 20_000)):
        table = pa.Table.from_pylist(batch)
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    if writer is not None:
        writer.close()


def big_checkpoint(folder: Path, vocab: int = 32_000) -> None:
    """A checkpoint whose tokenizer cuts and merges as those of large models do, trained on made words."""
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
    """CPU seconds that the tokenizer takes for the same texts, 512 at a time, in one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rust = LoadedTokenizer.load(folder / "model").rust
    source, start = texts(rows, characters), 0.0
    while batch := list(islice(source, 512)):
        before = time.process_time()
        rust.encode_batch_fast(batch, add_special_tokens=False)
        start += time.process_time() - before
    return start


def measure(
    folder: Path,
    rows: int,
    characters: int,
    form: str = "jsonl",
    kind: str = "template",
    workers: int | None = None,
    carry: bool = True,
    asleep_us: float = 0.0,
) -> dict[str, Any]:
    """Ingest such a file once; the checkpoint is there. With `asleep_us` workers only sleep, so long for each row."""
    path = folder / f"rows.{form}"
    write_rows(path, kind, rows, characters, equal=asleep_us > 0)
    if asleep_us:
        os.environ["ASLEEP_US"] = str(asleep_us)
        render_worker._ENTRY = "tests.batchinfer.child_tasks:render_asleep"
    named = (
        {"columns": ("id", "label") if carry else (), "id": "id"}
        if kind != "openai"
        else {"format": "openai"}
    )
    job = make_job(folder, prompt=PROMPTS[kind], path=str(path), **named)
    if kind == "schema":
        job = job.model_copy(
            update={"output": job.output.model_copy(update={"json_schema": json.dumps(SCHEMA)})}
        )
    start, before, seen = time.perf_counter(), _cpu(), [(0.0, 0)]
    given = options(workers=workers, max_model_len=32768, vocab_size=1 << 20)
    with PeakMemory() as memory:
        index = ingest(
            job, LoadedTokenizer.load(folder / "model"), given, folder / "scratch",
            lambda at: seen.append((time.perf_counter(), at.rows)),
        )  # fmt: skip
    seconds, cpu = time.perf_counter() - start, [now - then for now, then in zip(_cpu(), before, strict=True)]
    return {
        "rows": rows,
        "error_rows": index.error_rows,
        "tokens": index.total_tokens,
        "megabytes": round(path.stat().st_size / 1e6, 1),
        "seconds": round(seconds, 2),
        "rows_per_s": round(rows / seconds),
        "steady_rows_per_s": round(_steady(seen, rows)),
        "parent_us_per_row": round(1e6 * cpu[0] / rows, 1),
        "workers_us_per_row": round(1e6 * cpu[1] / rows, 1),
        "rows_per_cpu_s": round(rows / sum(cpu)),
        "peak_mib": round(memory.peak_bytes / 2**20),
    }


def _steady(seen: list[tuple[float, int]], rows: int) -> float:
    """Rows a second between the first fifth and the last tenth: processes start before, and then run out of work."""
    middle = [one for one in seen if 0.2 * rows < one[1] < 0.9 * rows]
    if len(middle) < 2:
        return 0.0
    return (middle[-1][1] - middle[0][1]) / (middle[-1][0] - middle[0][0])


def _cpu() -> list[float]:
    """CPU seconds of this thread, beside which another one measures memory, and of children that have ended."""
    found = os.times()
    return [time.thread_time(), found.children_user + found.children_system]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--characters", type=int, default=300)
    parser.add_argument("--format", nargs="+", default=["jsonl"], choices=["jsonl", "csv", "parquet"])
    parser.add_argument("--kind", nargs="+", default=["user"], choices=list(PROMPTS))
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--vocab", type=int, default=32_000, help="of a tokenizer that is made; 0: a tiny one"
    )
    parser.add_argument("--bare", action="store_true", help="carry no columns")
    parser.add_argument("--asleep-us", type=float, default=0.0, help="workers sleep so long for a row")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        big_checkpoint(folder / "model", given.vocab) if given.vocab else checkpoint(folder / "model")
        alone = tokenizer_alone(folder, min(given.rows, 50_000), given.characters) / min(given.rows, 50_000)
        print(json.dumps({"tokenizer_alone_us_per_row": round(1e6 * alone, 1)}))
        for form, kind, workers in product(given.format, given.kind, given.workers):
            found = measure(
                folder, given.rows, given.characters, form, kind, workers, not given.bare, given.asleep_us
            )
            share = round(alone * found["rows_per_cpu_s"], 3)
            print(json.dumps({"format": form, "kind": kind, "workers": workers} | found | {"share": share}))


if __name__ == "__main__":
    main()
