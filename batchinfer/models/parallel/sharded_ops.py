"""Operators that several ranks compute together: linear layers, experts, the embedding and the head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import AddedValues, Experts, Head, Linear
from batchinfer.models.ops.torch_ops import add_loads
from batchinfer.models.parallel.group import Group, merge_disjoint
from batchinfer.models.parallel.shard import Portion
from batchinfer.models.spec.spec import SHARED, ExpertsSpec, HeldExpert
from batchinfer_kernels.arithmetic import NO_TOKEN
from batchinfer_kernels.experts import Choice

# Products whose inputs are split among ranks, and whose outputs are therefore summed
SUMMED = ("o", "down", SHARED + "down")


class SummedLinear(Linear):
    """A linear layer whose inputs are split among ranks. Its outputs are summed over the ranks (all-reduce)."""

    def __init__(self, inner: Linear, group: Group) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._inner, self._group = inner, group

    def __call__(self, x: Tensor) -> Tensor:
        """Return the layer's outputs, (T, out), summed over all ranks, for this rank's inputs x, (T, in)."""
        return self._group.all_reduce(self._inner(x))

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        """Return the layer's outputs with LoRA, (T, out), summed over all ranks.

        Args:
            x: (T, in), this rank's inputs.
            added: The values that adapters compute from this rank's inputs.
        """
        return self._group.all_reduce(self._inner.adapted(x, added))


class SummedExperts(Experts):
    """The experts of a layer whose intermediate columns are split among ranks. Outputs are summed over the ranks."""

    def __init__(self, inner: Experts, group: Group) -> None:
        self.loads = inner.loads
        self._inner, self._group = inner, group

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        """Return the weighted sum of each token's experts, (T, hidden), over all ranks; see `Experts.__call__`."""
        return self._group.all_reduce(self._inner(x, choice, counted))


class HeldExperts(Experts):
    """The experts of a layer, distributed over ranks as whole experts.

    If several ranks hold an expert, they compute its tokens in turn.
    """

    def __init__(self, inner: Experts, ops: Ops, spec: ExpertsSpec, group: Group, exact: bool) -> None:
        """Create the layer.

        Args:
            inner: The experts that this rank holds, numbered from 0.
            ops: The operators of the rank.
            spec: The layer's experts, whose `held` names the experts of this rank.
            group: The ranks that share the experts.
            exact: If True, return the same bits as a single process.
        """
        assert spec.held is not None, "a single rank holds all experts"
        device = inner.loads.device
        self.loads = torch.zeros(spec.routing.experts, dtype=torch.int64, device=device)
        self._inner, self._ops, self._none = inner, ops, len(spec.held)
        self._copies, self._numbers = _turns(spec.held, spec.routing.experts, device)
        self._group, self._exact = group, exact

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs on all ranks, (T, hidden).

        Args:
            x: (T, hidden), equal on all ranks.
            choice: The experts that the router chose for each token, numbered as in the whole model, and their weights.
            counted: (T,) bool, False for padding, which `loads` does not count. None: all tokens are counted.
        """
        add_loads(self.loads, choice.experts, counted)
        numbers = self._own_numbers(choice.experts)
        # Ranks exchange the output of each expert, and add outputs in the order of a single process
        if self._exact:
            return self._ops.combine(
                merge_disjoint(self._compute_own(x, numbers), self._group), choice.weights
            )
        return self._group.all_reduce(self._sum_own(x, Choice(numbers, choice.weights)))

    def _sum_own(self, x: Tensor, choice: Choice) -> Tensor:
        if self._inner.skips:
            return self._inner(x, choice)
        return self._ops.combine(self._compute_own(x, choice.experts), choice.weights)

    def _compute_own(self, x: Tensor, numbers: Tensor) -> Tensor:
        chosen, each = numbers.shape[1], numbers.flatten()
        if self._inner.skips:
            return self._compute_rows(x.repeat_interleave(chosen, 0), each)
        own = (each < self._none).nonzero().flatten()
        made = x.new_zeros(len(each), x.shape[1])
        if len(own):
            made[own] = self._compute_rows(x[own // chosen], each[own])
        return made

    def _own_numbers(self, experts: Tensor) -> Tensor:
        if self._numbers.shape[1] == 1:
            return self._numbers[:, 0][experts]
        places = torch.arange(len(experts), device=experts.device)[:, None]
        return self._numbers[experts, places % self._copies[experts]]

    def _compute_rows(self, rows: Tensor, numbers: Tensor) -> Tensor:
        # A weight of 1 leaves the bits of the output unchanged
        ones = torch.ones(len(rows), 1, device=rows.device)
        return self._inner(rows, Choice(numbers[:, None], ones))


def _turns(held: Sequence[HeldExpert], experts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    # First, the number of copies of each expert, (experts,); 1 for experts that this rank does not hold. Second, for
    # each expert and turn, (experts, max copies), the expert's index in `held`; `len(held)` on another rank's turn
    copies = torch.ones(experts, dtype=torch.int64)
    numbers = torch.full((experts, max(one.copies for one in held)), len(held), dtype=torch.int64)
    for inner, one in enumerate(held):
        copies[one.number], numbers[one.number, one.turn] = one.copies, inner
    return copies.to(device), numbers.to(device)


class SplitEmbedding:
    """An embedding table whose rows are split among ranks.

    Each rank looks up its own tokens, and results are exchanged.
    """

    def __init__(self, ops: Ops, tokens: tuple[int, int], group: Group) -> None:
        """Create the embedding.

        Args:
            ops: The operators.
            tokens: The range of token ids whose rows this rank has, (first, end).
            group: The ranks.
        """
        self._ops, self._tokens, self._group = ops, tokens, group

    def __call__(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Return the embeddings of tokens, (T, hidden), with the same bits as a lookup in the unsplit table.

        Args:
            token_ids: (T,) int64, equal on all ranks. They may belong to rows of any rank.
            table: (rows of this rank, hidden), this rank's part of the table.
        """
        first, end = self._tokens
        own = (token_ids >= first) & (token_ids < end)
        rows = self._ops.embedding((token_ids - first).clamp(0, end - first - 1), table)
        return merge_disjoint(rows.masked_fill_(~own[:, None], 0), self._group)


class SplitHead(Head):
    """An output layer (lm_head) whose vocabulary is split among ranks.

    Each rank gets the logits of the whole vocabulary.
    """

    def __init__(self, inner: Head, vocab: int, group: Group) -> None:
        self.in_features, self.out_features = inner.in_features, vocab
        self._inner, self._group = inner, group
        self._spans = [Portion(rank, group.size).span(vocab) for rank in range(group.size)]

    def __call__(self, x: Tensor) -> Tensor:
        """Return logits of the whole vocabulary, (n, vocab), from normed hidden states x, (n, hidden)."""
        logits = self._inner(x)
        widest = max(end - first for first, end in self._spans)
        padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[1]))
        found = self._group.all_gather(padded)
        return torch.cat(
            [part[:, : end - first] for part, (first, end) in zip(found, self._spans, strict=True)], 1
        )

    def argmax(self, x: Tensor) -> Tensor:
        """Return the token with the greatest logit in each row, (n,) int64; NO_TOKEN if the logit is not finite.

        Each rank sends only its greatest logit per row, and the token that has it.

        Args:
            x: (n, hidden), normed hidden states.
        """
        best, tokens = self._inner(x).max(-1)
        first = self._spans[self._group.rank][0]
        # float64 represents both the logit and the token id exactly
        found = self._group.all_gather(torch.stack((best.double(), (tokens + first).double())))
        logits, ids = found[:, 0], found[:, 1].long()
        # Of equal logits, max() picks the lowest rank, which has the lowest token id. NaN counts as the greatest value
        greatest, ranks = logits.max(0)
        return torch.where(greatest.isfinite(), ids.gather(0, ranks[None])[0], NO_TOKEN)
