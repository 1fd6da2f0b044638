"""Splits a step into sequential micro-batches when there is no memory to run it at once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import pairwise

from batchinfer.engine.tensors.batch import HostBatch

_log = logging.getLogger(__name__)


# Successful steps of at least half the limit before a larger step is tried. A failed attempt costs about two steps.
STEPS_BEFORE_RETRY = 256


@dataclass(slots=True)
class MicroBatches:
    """Limits the number of tokens per forward pass after the device ran out of memory.

    The limit is halved when memory runs out, and doubled after 256 successful steps, or more if the doubled limit
    failed before.

    Attributes:
        most_tokens: The maximum number of tokens per forward pass. None: unlimited.
        whole_chunks: True if chunks must not be split, as for encoders, whose tokens attend to later tokens.
    """

    most_tokens: int | None = None
    whole_chunks: bool = False
    _failed_tokens: int = 0  # the largest step that ran out of memory
    _last_limit: int = 0  # the limit before it was last doubled; 0: it was not doubled since it fell
    _successes: int = 0  # steps of at least half the limit since the limit last changed
    _steps_before_retry: int = field(default_factory=lambda: STEPS_BEFORE_RETRY)

    def split(self, step: HostBatch) -> list[HostBatch]:
        """Split a step into micro-batches of at most `most_tokens` tokens, in order.

        A chunk that is longer than the limit is split, unless `whole_chunks` is True.
        """
        most = self.most_tokens
        if most is None or len(step.token_ids) <= most:
            return [step]
        edges = _edges(step.query_lens, most, self.whole_chunks)
        return [step.part(first, end) for first, end in pairwise(edges)]

    def is_least(self, step: HostBatch) -> bool:
        """Return True if a step cannot be split: it has one token, or `whole_chunks` is True and it has one chunk."""
        return len(step.query_lens if self.whole_chunks else step.token_ids) == 1

    def shrink(self, tokens: int, rows: int) -> None:
        """Lower the limit of tokens per forward pass after a step ran out of memory.

        Args:
            tokens: The number of tokens of the failed step, at least 2.
            rows: The number of rows of the failed step. It is only logged.
        """
        soon = self._last_limit > 0 and self._successes < self._steps_before_retry
        self._steps_before_retry = 2 * self._steps_before_retry if soon else STEPS_BEFORE_RETRY
        self._failed_tokens = max(self._failed_tokens, tokens)
        self.most_tokens = self._last_limit if tokens // 2 <= self._last_limit < tokens else tokens // 2
        self._last_limit = self._successes = 0
        _log.warning(
            "the device had too little memory for a step of %d tokens of %d rows: steps now have at most %d tokens; "
            "larger ones are tried again after %d steps. If this recurs, lower engine.kv_memory, "
            "engine.max_num_batched_tokens or engine.max_num_seqs",
            tokens,
            rows,
            self.most_tokens,
            self._steps_before_retry,
        )

    def succeeded(self, tokens: int) -> None:
        """Count a forward pass that did not run out of memory. After enough of them, the limit is doubled.

        Args:
            tokens: The number of tokens of the forward pass. It only counts if it had at least half of the limit.
        """
        if not self._failed_tokens or tokens < (self.most_tokens or self._failed_tokens) // 2:
            return
        self._successes += 1
        if self.most_tokens is None or self._successes < self._steps_before_retry:
            return
        self._last_limit, self._successes = self.most_tokens, 0
        self.most_tokens *= 2
        if self.most_tokens >= self._failed_tokens:
            self.most_tokens = None
        _log.info(
            "%d steps of at most %d tokens have succeeded: %s tokens are run at once again",
            self._steps_before_retry,
            self._last_limit,
            self.most_tokens or f"{self._failed_tokens} and more",
        )


def _edges(lengths: list[int], most: int, whole: bool = False) -> list[int]:
    edges, done = [0], 0
    for length in lengths:
        sizes = [*[most] * (length // most), *[length % most] * (length % most > 0)]
        for size in [length] if whole else sizes:
            if done > edges[-1] and done + size - edges[-1] > most:
                edges.append(done)
            done += size
    return [*edges, done]
