"""An embedding and a head of which each rank has the rows of some tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer.models.ops.interface import Head, Ops
from batchinfer.models.parallel.group import Group
from batchinfer.models.parallel.place import Portion
from batchinfer.models.parallel.same_bits import merged
from batchinfer_kernels.arithmetic import NO_TOKEN


class SplitEmbedding:
    """The rows of the tokens from the first to before the second of `tokens`; the others are those of other ranks."""

    def __init__(self, ops: Ops, tokens: tuple[int, int], group: Group) -> None:
        self._ops, self._tokens, self._group = ops, tokens, group

    def __call__(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids: (T,) int64; table: (tokens of the rank, hidden) → (T, hidden), with the bits of a whole table."""
        first, end = self._tokens
        own = (token_ids >= first) & (token_ids < end)
        rows = self._ops.embedding((token_ids - first).clamp(0, end - first - 1), table)
        return merged(rows.masked_fill_(~own[:, None], 0), self._group)


class SplitHead(Head):
    """A head each of whose ranks makes the logits of some tokens; all ranks get those of all."""

    def __init__(self, inner: Head, vocab: int, group: Group) -> None:
        self.in_features, self.out_features = inner.in_features, vocab
        self._inner, self._group = inner, group
        self._spans = [Portion(rank, group.size).span(vocab) for rank in range(group.size)]

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._inner(x)
        widest = max(end - first for first, end in self._spans)
        padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[1]))
        found = self._group.all_gather(padded)
        return torch.cat(
            [part[:, : end - first] for part, (first, end) in zip(found, self._spans, strict=True)], 1
        )

    def argmax(self, x: Tensor) -> Tensor:
        """As of all logits, of which each rank sends its greatest and where that is."""
        best, tokens = self._inner(x).max(-1)
        first = self._spans[self._group.rank][0]
        # A number that float64 holds exactly, as it does the logit
        found = self._group.all_gather(torch.stack((best.double(), (tokens + first).double())))
        logits, ids = found[:, 0], found[:, 1].long()
        # The lowest rank of equals has the lowest token; NaN is greater than all others
        greatest, ranks = logits.max(0)
        return torch.where(greatest.isfinite(), ids.gather(0, ranks[None])[0], NO_TOKEN)
