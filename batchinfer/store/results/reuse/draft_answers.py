"""Requests to a draft model for the requests of a plan, and its stored answers.

The files are in the folder of the plan and sorted by `seq`, like the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pyarrow as pa

from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.filesystem.duck import connection, parquet
from batchinfer.filesystem.durable import FileOps
from batchinfer.input.prompts.keys import WorkKeys, token_bytes
from batchinfer.store.answers.completion_store import write_table

_KEYS = pa.schema([("seq", pa.int64()), ("draft_key", pa.binary(32))])
_ROWS_READ = 4096


class DraftRequests:
    """Derives requests to a draft model from requests to the target model.

    The answers of the draft model are used as drafts. A sampled request uses the random draws of the original
    request, so that both models often sample the same token.
    """

    def __init__(self, context: bytes, longest: int, vocab: int) -> None:
        """Set the limits of the draft model.

        Args:
            context: The digest that enters every work key of the draft model.
            longest: Maximum tokens of a prompt and its answer together.
            vocab: The number of tokens in the vocabulary.
        """
        self._context, self._longest, self._vocab = context, longest, vocab

    def of(self, request: Request) -> Request | None:
        """Return the request to the draft model for a request to the target model.

        Return None if the request generates no tokens, is too long for the draft model, or uses tokens
        outside its vocabulary.
        """
        if not request.params.gives_tokens:
            return None
        room = self._longest - len(request.prompt)
        if room < 1 or request.prompt.max() >= self._vocab or _largest(request.params) >= self._vocab:
            return None
        params = _plain(request.params)
        if params.greedy:
            key = _keys(self._context, params).key(token_bytes(request.prompt))
        else:
            key = hashlib.sha256(b"drawn as" + request.key + self._context).digest()
        params = replace(params, max_tokens=min(params.max_tokens, room))
        draws = b"" if params.greedy else request.key
        return Request(key, request.prompt, params, request.shares_next, draws=draws)


@lru_cache(maxsize=256)
def _plain(params: SamplingParams) -> SamplingParams:
    return replace(params, logprobs=None, prompt_logprobs=None, confidence=False, adapter="")


@lru_cache(maxsize=256)
def _largest(params: SamplingParams) -> int:
    return max((*(token for token, _ in params.logit_bias), *params.allowed_token_ids), default=0)


@lru_cache(maxsize=256)
def _keys(context: bytes, params: SamplingParams) -> WorkKeys:
    return WorkKeys(context, params.to_json())


def write_draft_keys(
    plan: Path,
    requests: Iterable[tuple[Sequence[int], Sequence[Request]]],
    draft: DraftRequests,
    ops: FileOps,
) -> Path:
    """Write the work keys of the requests to the draft model to a Parquet file, and return the file.

    It is in the folder of the plan and has the columns `seq` (number of the request in the plan) and
    `draft_key`.

    Args:
        plan: The file of the plan.
        requests: Batches of requests of the plan, each with their numbers in the plan.
        draft: Derives the requests to the draft model.
        ops: File operations.

    Raises:
        StorageError: The file cannot be written.
    """
    path = plan.with_name("draft-keys.parquet")
    rows = pa.RecordBatchReader.from_batches(_KEYS, _key_batches(requests, draft))
    write_table(path, rows, ops)
    return path


def _key_batches(
    requests: Iterable[tuple[Sequence[int], Sequence[Request]]], draft: DraftRequests
) -> Iterator[pa.RecordBatch]:
    for seqs, batch in requests:
        asked = zip(seqs, map(draft.of, batch), strict=True)
        there = [(seq, one.key) for seq, one in asked if one is not None]
        columns = zip(*there, strict=True) if there else ((), ())
        arrays = [pa.array(values, field.type) for values, field in zip(columns, _KEYS, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=_KEYS)


def write_lacking(keys: Path, parts: Sequence[Path], spill: Path, ops: FileOps) -> tuple[Path, int]:
    """Write which requests to the draft model have no stored answer and must be computed.

    The Parquet file has the column `seq`, the number of the request in the plan. Of equal requests, only the
    first is included.

    Args:
        keys: The file from `write_draft_keys`.
        parts: Parts of the store.
        spill: Folder for temporary files.
        ops: File operations.

    Returns:
        The file, and the number of requests.

    Raises:
        StorageError: A file cannot be read or written.
        OutOfMemory: DuckDB exceeded its memory limit.
    """
    path = keys.with_name("draft-lacking.parquet")
    stored = f"ANTI JOIN (SELECT key AS draft_key FROM {parquet(parts)}) USING (draft_key)" if parts else ""
    lacking = f"SELECT min(seq) AS seq FROM {parquet([keys])} {stored} GROUP BY draft_key ORDER BY seq"
    with connection(spill) as database:
        write_table(path, database.sql(lacking).to_arrow_reader(_ROWS_READ), ops)
        ((rows,),) = database.execute(f"SELECT count(*) FROM {parquet([path])}").fetchall()
    return path, int(rows)


def write_draft_answers(keys: Path, parts: Sequence[Path], spill: Path, ops: FileOps) -> Path:
    """Write the stored answers of the draft model to a Parquet file, and return the file.

    It has the columns `seq` (number of the request in the plan) and `tokens`.

    Args:
        keys: The file from `write_draft_keys`.
        parts: Parts of the store.
        spill: Folder for temporary files.
        ops: File operations.

    Raises:
        StorageError: A file cannot be read or written.
        OutOfMemory: DuckDB exceeded its memory limit.
    """
    path = keys.with_name("draft-answers.parquet")
    with connection(spill) as database:
        stored = f"SELECT key AS draft_key, token_ids FROM {parquet(parts)} WHERE error_code IS NULL"
        found = database.sql(
            f"SELECT DISTINCT ON (seq) seq, token_ids AS tokens FROM {parquet([keys])} "
            f"JOIN ({stored}) USING (draft_key) ORDER BY seq"
        )
        write_table(path, found.to_arrow_reader(_ROWS_READ), ops)
    return path
