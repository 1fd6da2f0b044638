"""A small index on disk in the layout of ingest, and completions for it, without a tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.request import Completion, RowError, Tokens
from batchinfer.core.sampling import SamplingParams
from batchinfer.filesystem.state import StateFolder
from batchinfer.input.prompts.keys import token_bytes
from batchinfer.store.answers.completion_store import CompletionStore
from batchinfer.store.index.index import BestOf, Index, Layout, index_schema
from batchinfer.store.results.join import join_answers
from batchinfer.store.results.manifest import Manifest, PublishSpec
from batchinfer.store.results.publisher import publish

PARAMS = SamplingParams(max_tokens=8).to_json()
SPEC = PublishSpec("job", "1" * 64, ({"path": "in.jsonl", "bytes": 5, "sha256": "cd"},), 1, 10)


def key_of(tokens: Sequence[int], expected: int) -> bytes:
    return hashlib.sha256(f"{list(tokens)} {expected}".encode()).digest()


def good_row(row_id: int, tokens: Sequence[int], expected: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "tokens": tokens,  # no column: `write_index` writes them to the token store
        "row_id": row_id,
        "file": "in.jsonl",
        "row_index": row_id,
        "custom_id": f"id-{row_id}",
        "key": key_of(tokens, expected),
        "token_count": len(tokens),
        "params": PARAMS,
        "greedy": True,
        "expected_tokens": expected,
        **more,
    }


def bad_row(row_id: int, retryable: bool = False) -> dict[str, Any]:
    place = {"row_id": row_id, "file": "in.jsonl", "row_index": row_id}
    error = {"error_code": "bad_json", "error_class": "input", "error_message": "not JSON"}
    return {**place, **error, "retryable": retryable}


def small_index(folder: Path, rows: int, passthrough: pa.Schema | None = None, **values: Any) -> Index:
    """Write an index with these values. Its passthrough columns may have no files."""
    index = Index(folder, "", rows, 0, 0, (), {}, **values)
    if passthrough is not None:
        vars(index)["passthrough_schema"] = passthrough
    return index


def write_index(
    folder: Path,
    rows: Sequence[dict[str, Any]],
    passthrough: pa.Table | None = None,
    rows_per_part: int = 1000,
    attempts: int = 1,
    best: BestOf | None = None,
) -> Index:
    (folder / "index").mkdir(parents=True)
    (folder / "passthrough").mkdir()
    prompts = [np.asarray(row.get("tokens", ()), np.int32) for row in rows]
    tokens = Layout(folder).tokens
    tokens.parent.mkdir()
    tokens.write_bytes(b"".join(map(token_bytes, prompts)))
    offsets = np.cumsum([0, *map(len, prompts)]).tolist()
    placed = [
        {**row, "token_offset": offset} if "tokens" in row else row
        for row, offset in zip(rows, offsets, strict=False)
    ]
    if best is not None:
        placed = [
            {**row, "input_row": number // best.computed, "sample_index": number % best.computed}
            for number, row in enumerate(placed)
        ]
    table = pa.Table.from_pylist(placed, schema=index_schema(True, attempts, samples=best is not None))
    values = pa.table({"row_id": table["row_id"]})
    for name in passthrough.column_names if passthrough else []:
        values = values.append_column(passthrough.schema.field(name), passthrough[name])
    for number, start in enumerate(range(0, len(rows), rows_per_part)):
        name = f"part-{number:05d}.parquet"
        pq.write_table(table.slice(start, rows_per_part), folder / "index" / name)
        pq.write_table(values.slice(start, rows_per_part), folder / "passthrough" / name)
    return small_index(folder, len(rows), attempts=attempts, samples=best is not None, best=best)


def answer(key: bytes, length: int | None = None) -> Completion:
    """Return a completion whose tokens depend only on the key."""
    count = 1 + key[0] % 9 if length is None else length
    tokens = np.frombuffer(key * (1 + count // 32), np.uint8)[:count].astype(np.int32)
    return Completion(key, Tokens(tokens), "stop")


def failure(key: bytes, retryable: bool = True) -> Completion:
    error = RowError("nan_logits", "engine", "the model gave NaN", retryable)
    return Completion(key, None, "error", error)


class Numbers:
    """A detokenizer that writes ids as numbers. Ids from 1,000 on are special tokens."""

    def decode_batch(self, rows: list[Sequence[int]]) -> list[str]:
        return [" ".join(str(token) for token in tokens if token < 1000) for tokens in rows]

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        return [f"<{token}>" if token >= 1000 else f" {token}" for token in ids]

    @property
    def specials(self) -> frozenset[int]:
        return frozenset(range(1000, 1010))

    def bytes_of(self, token: int) -> bytes:
        return self.token_texts([token])[0].encode()

    def text_of(self, ids: Sequence[int]) -> str:
        return self.decode_batch([ids])[0]


decode = Numbers()


def mixed_rows(count: int, *, bad_every: int = 7, distinct: int = 1 << 30) -> list[dict[str, Any]]:
    """Return valid rows with some duplicates, and every `bad_every`-th row invalid."""

    def one(row_id: int) -> dict[str, Any]:
        if row_id % bad_every == bad_every - 1:
            return bad_row(row_id)
        return good_row(row_id, [row_id % distinct, 1, 2])

    return [one(row_id) for row_id in range(count)]


def keys_in(rows: Sequence[dict[str, Any]]) -> list[bytes]:
    return list(dict.fromkeys(row["key"] for row in rows if row.get("key")))


def published(
    folder: Path,
    index: Index,
    *commits: Iterable[Completion],
    spec: PublishSpec = SPEC,
    state: StateFolder | None = None,
    memory_limit: str | None = None,
    **more: Any,
) -> Manifest:
    """Publish the rows of an index to `folder/res`, after one commit to the store per item of `commits`."""
    state = state or StateFolder(folder / "res")
    with state.lock(), CompletionStore(state.completions) as store:
        for completions in commits:
            store.append(completions)
            store.commit()
        join = join_answers(
            index.index_parts, store.parts(), index.folder / "join", memory_limit=memory_limit
        )
        return publish(index, join, spec, decode, state, **more)


def published_files(folder: Path) -> dict[str, bytes]:
    """Return the contents of the published files by name."""
    return {path.name: path.read_bytes() for path in sorted((folder / "res").iterdir())}
