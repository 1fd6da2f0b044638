"""Reads the requests of a plan, in order."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.content_root import ContentRoots, shared_by, shared_tokens
from batchinfer.core.request import Request, TokenIds
from batchinfer.core.sampling import SamplingParams
from batchinfer.plan.order.plan import Plan, PlanBatch

LONG_PARAMS = 16 << 10  # characters
_GAP = 4096  # tokens; copying 16 KiB between two prompts is faster than a further read
_AT_ONCE = 1 << 18  # tokens per read


class Prompts(Protocol):
    """The interface of the token ids of all prompts of a job, concatenated. Any range of them can be read."""

    def read(self, offset: int, count: int) -> TokenIds:
        """Return `count` token ids, from position `offset` in the concatenated prompts."""


def read_together(
    prompts: Prompts, offsets: NDArray[np.int64], counts: NDArray[np.integer]
) -> Iterator[tuple[slice, TokenIds, NDArray[np.int64]]]:
    """Yield the tokens of prompts in batches of about _AT_ONCE (262,144) tokens.

    Prompts that are next to each other in the store are read with one read.

    Args:
        prompts: The token ids of all prompts.
        offsets: Position in `prompts` of each prompt, or of the part of it to read.
        counts: Number of tokens to read of each prompt.

    Yields:
        The range of prompts in the batch, as indices into `offsets`; an array with their tokens (and short gaps between
            them); and the start of each prompt in that array.
    """
    if not len(offsets):
        return
    ends = offsets + counts
    breaks = np.diff(offsets // _AT_ONCE) != 0
    breaks |= (offsets[1:] < offsets[:-1]) | (offsets[1:] > ends[:-1] + _GAP)
    reads = np.append(0, np.flatnonzero(breaks) + 1)  # index of the first prompt of each read
    places = np.diff(reads, append=len(offsets))
    firsts = offsets[reads]
    spans = np.maximum.reduceat(ends, reads) - firsts
    begins = np.cumsum(spans) - spans
    groups = np.append(0, np.flatnonzero(np.diff(begins // _AT_ONCE)) + 1)
    for start, end in pairwise([*groups.tolist(), len(reads)]):
        each = zip(firsts[start:end].tolist(), spans[start:end].tolist(), strict=True)
        tokens = [prompts.read(*one) for one in each]
        some = slice(int(reads[start]), int(reads[start] + places[start:end].sum()))
        moved = np.repeat(begins[start:end] - begins[start] - firsts[start:end], places[start:end])
        yield some, tokens[0] if len(tokens) == 1 else np.concatenate(tokens), offsets[some] + moved


def read_requests(
    plan: Plan,
    prompts: Prompts,
    rows: int,
    roots: ContentRoots,
    every: int = 1,
    without: AbstractSet[bytes] = frozenset(),
) -> Iterator[tuple[PlanBatch, list[Request]]]:
    """Yield the requests of a plan in order, in batches: pairs of the plan's rows and the requests made from them.

    Each batch is yielded after the next one has been read, because `shares_next` of its last request depends on the
    next request.

    Args:
        plan: The plan.
        prompts: The token ids of all prompts.
        rows: Requests per batch.
        roots: Tells which requests may share cached prefixes.
        every: If n > 1, read only every n-th batch, as if the plan had no others.
        without: Work keys of requests to leave out.
    """
    held: tuple[PlanBatch, list[Request]] | None = None
    for batch in filter(len, (batch.without(without) for batch in plan.batches(rows, every))):
        requests = _read(batch, prompts, roots)
        if held is not None:
            before = held[1]
            before[-1] = replace(before[-1], shares_next=shared_by([before[-1], requests[0]], roots)[0])
            yield held
        held = batch, requests
    if held is not None:
        yield held


def _read(batch: PlanBatch, prompts: Prompts, roots: ContentRoots) -> list[Request]:
    offsets, counts = batch.numbers("token_offset").tolist(), batch.numbers("token_count").tolist()
    expected = batch.numbers("expected_tokens").tolist()
    params = [*map(request_params, batch.params, expected)]
    ids = [*map(prompts.read, offsets, counts)]
    shared = shared_tokens(ids, roots.of_all(counts, params))
    return [*map(Request, batch.keys, ids, params, [*shared, 0])]


def request_params(text: str, expected: int) -> SamplingParams:
    """Parse the sampling parameters of a request. Results are cached.

    Args:
        text: The parameters as JSON.
        expected: The maximum number of output tokens, which replaces `max_tokens` of the JSON.
    """
    return (_few if len(text) > LONG_PARAMS else _many)(text, expected)


@lru_cache(maxsize=4096)
def _many(text: str, expected: int) -> SamplingParams:
    return replace(SamplingParams.from_json(text), max_tokens=expected)


_few = lru_cache(maxsize=64)(_many.__wrapped__)
