"""Operators that several ranks compute together: linear layers, experts, the embedding and the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import AddedValues, Experts, Head, Linear
from batchinfer.models.ops.torch_ops import add_loads
from batchinfer.models.parallel.group import Group, merged
from batchinfer.models.parallel.place import Portion
from batchinfer.models.spec.spec import SHARED, ExpertsSpec, HeldExpert
from batchinfer_kernels.arithmetic import NO_TOKEN
from batchinfer_kernels.experts import Choice

# The products that read what ranks have a part of
SUMMED = ("o", "down", SHARED + "down")


class SummedLinear(Linear):
    """A product of the rank's inputs, added up over all ranks."""

    def __init__(self, inner: Linear, group: Group) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._inner, self._group = inner, group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self._inner(x))

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        return self._group.all_reduce(self._inner.adapted(x, added))


class SummedExperts(Experts):
    """Experts of which the rank has some columns each, added up over all ranks."""

    def __init__(self, inner: Experts, group: Group) -> None:
        self.loads = inner.loads
        self._inner, self._group = inner, group

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        return self._group.all_reduce(self._inner(x, choice, counted))


class HeldExperts(Experts):
    """All experts of a layer: each rank computes those that it has, and what they give is added up over all ranks.

    All ranks choose alike, as the router is on each. Of an expert that several ranks have, each computes the tokens
    whose turn it is by their places in the step, which are the same on all. Where it is `exact`, each result is sent,
    and they are weighted and added by the operator that one process adds them with, in the order of the choice; else
    each rank adds up its own, and the sums of the ranks are added.
    """

    def __init__(self, inner: Experts, ops: Ops, spec: ExpertsSpec, group: Group, exact: bool) -> None:
        """`inner`: the experts that the rank has, numbered from 0 on."""
        assert spec.held is not None, "a rank alone has all of them"
        device = inner.loads.device
        self.loads = torch.zeros(spec.routing.experts, dtype=torch.int64, device=device)
        self._inner, self._ops, self._none = inner, ops, len(spec.held)
        self._copies, self._numbers = _turns(spec.held, spec.routing.experts, device)
        self._group, self._exact = group, exact

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        add_loads(self.loads, choice.experts, counted)
        numbers = self._own_numbers(choice.experts)
        if self._exact:
            return self._ops.combine(merged(self._made(x, numbers), self._group), choice.weights)
        return self._group.all_reduce(self._added(x, Choice(numbers, choice.weights)))

    def _added(self, x: Tensor, choice: Choice) -> Tensor:
        """Return (T, N), the weighted sum of what this rank's experts make of each token."""
        if self._inner.skips:
            return self._inner(x, choice)
        return self._ops.combine(self._made(x, choice.experts), choice.weights)

    def _made(self, x: Tensor, numbers: Tensor) -> Tensor:
        """Return (T × chosen, N), the result of each token's experts in the order of its choice, unweighted; zeros for
        those of other ranks. `numbers`: (T, chosen), as of `_own_numbers`."""
        chosen, each = numbers.shape[1], numbers.flatten()
        if self._inner.skips:
            return self._each(x.repeat_interleave(chosen, 0), each)
        own = (each < self._none).nonzero().flatten()
        made = x.new_zeros(len(each), x.shape[1])
        if len(own):
            made[own] = self._each(x[own // chosen], each[own])
        return made

    def _own_numbers(self, experts: Tensor) -> Tensor:
        """Return (T, chosen) the inner numbers of chosen experts whose tokens are this rank's; of others that behind
        the last one."""
        if self._numbers.shape[1] == 1:
            return self._numbers[:, 0][experts]
        places = torch.arange(len(experts), device=experts.device)[:, None]
        return self._numbers[experts, places % self._copies[experts]]

    def _each(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Compute each row with one expert, whose result keeps its bits: its weight is 1."""
        ones = torch.ones(len(rows), 1, device=rows.device)
        return self._inner(rows, Choice(numbers[:, None], ones))


def _turns(held: Sequence[HeldExpert], experts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (experts,) how many copies there are of each, as far as they matter here, and (experts, most copies) the
    inner number of whom has each turn; the number behind the last one for turns of other ranks."""
    copies = torch.ones(experts, dtype=torch.int64)
    numbers = torch.full((experts, max(one.copies for one in held)), len(held), dtype=torch.int64)
    for inner, one in enumerate(held):
        copies[one.number], numbers[one.number, one.turn] = one.copies, inner
    return copies.to(device), numbers.to(device)


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
        # float64 holds both exactly, the logit and the token's number
        found = self._group.all_gather(torch.stack((best.double(), (tokens + first).double())))
        logits, ids = found[:, 0], found[:, 1].long()
        # The lowest rank of equals has the lowest token; NaN is greater than all others
        greatest, ranks = logits.max(0)
        return torch.where(greatest.isfinite(), ids.gather(0, ranks[None])[0], NO_TOKEN)
