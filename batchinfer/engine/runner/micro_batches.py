"""Splits a step into micro-batches that run one after the other when there is no memory to run it at once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import pairwise

from batchinfer.engine.tensors.batch import HostBatch

_log = logging.getLogger(__name__)


# Steps of at least half the limit that have to succeed before a larger one is tried. A step for which there is no
# memory costs about two: one in PATIENCE steps is little, and a peak that has passed is forgotten within seconds.
PATIENCE = 256


@dataclass(slots=True)
class MicroBatches:
    """Limits the tokens, and so the rows, that run at once; None: no limit.

    The limit is halved when memory runs out, and doubled again after `PATIENCE` good steps: a peak may have passed. If
    the larger size fails too soon, it falls back, and twice as many good steps have to come before the next attempt.
    So a size for which there is never memory is tried fewer and fewer times.
    """

    most_tokens: int | None = None
    whole: bool = False  # a chunk is never divided: its tokens see later ones, too
    _asked: int = 0  # the most tokens for which there was no memory
    _held: int = 0  # the limit before it was doubled last
    _good: int = 0  # steps that counted since it last fell or rose
    _patience: int = field(default_factory=lambda: PATIENCE)

    def split(self, step: HostBatch) -> list[HostBatch]:
        """Split a step into micro-batches, in the same order; a chunk that is too long becomes several, unless chunks
        stay whole. A later micro-batch reads from the cache what an earlier one wrote, so the results are the same.
        """
        most = self.most_tokens
        if most is None or len(step.token_ids) <= most:
            return [step]
        edges = _edges(step.query_lens, most, self.whole)
        return [step.part(first, end) for first, end in pairwise(edges)]

    def is_least(self, step: HostBatch) -> bool:
        """Whether a step cannot be divided any more."""
        return len(step.query_lens if self.whole else step.token_ids) == 1

    def shrink(self, tokens: int, rows: int) -> None:
        """Lower the limit after the device ran out of memory for this many tokens, two at least."""
        soon = self._held > 0 and self._good < self._patience
        self._patience = 2 * self._patience if soon else PATIENCE
        self._asked = max(self._asked, tokens)
        self.most_tokens = self._held if tokens // 2 <= self._held < tokens else tokens // 2
        self._held = self._good = 0
        _log.warning(
            "the device had too little memory for a step of %d tokens of %d rows: steps now have at most %d tokens; "
            "larger ones are tried again after %d steps. If this recurs, lower engine.kv_memory, "
            "engine.max_num_batched_tokens or engine.max_num_seqs",
            tokens,
            rows,
            self.most_tokens,
            self._patience,
        )

    def succeeded(self, tokens: int) -> None:
        """Count a step that ran at once. Raises the limit after enough of them."""
        if not self._asked or tokens < (self.most_tokens or self._asked) // 2:
            return
        self._good += 1
        if self.most_tokens is None or self._good < self._patience:
            return
        self._held, self._good = self.most_tokens, 0
        self.most_tokens *= 2
        if self.most_tokens >= self._asked:
            self.most_tokens = None
        _log.info(
            "%d steps of at most %d tokens have succeeded: %s tokens are run at once again",
            self._patience,
            self._held,
            self.most_tokens or f"{self._asked} and more",
        )


def _edges(lengths: list[int], most: int, whole: bool = False) -> list[int]:
    """Return where micro-batches of chunks of these lengths begin and end. A chunk is divided only where it has more
    tokens than fit at once, and not where it stays `whole`."""
    edges, done = [0], 0
    for length in lengths:
        sizes = [*[most] * (length // most), *[length % most] * (length % most > 0)]
        for size in [length] if whole else sizes:
            if done > edges[-1] and done + size - edges[-1] > most:
                edges.append(done)
            done += size
    return [*edges, done]
