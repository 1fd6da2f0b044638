"""Experts of which each rank has some."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchinfer.models.ops.interface import Experts, Ops
from batchinfer.models.ops.torch_ops import add_loads
from batchinfer.models.parallel.group import Group
from batchinfer.models.parallel.same_bits import merged
from batchinfer.models.spec.spec import ExpertsSpec, HeldExpert
from batchinfer_kernels.experts import Choice


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
