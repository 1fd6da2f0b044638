"""Experts of which each rank has a range."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer.models.ops.interface import Experts, Ops
from batchinfer.models.ops.torch_ops import add_loads
from batchinfer.models.parallel.group import Group
from batchinfer.models.parallel.same_bits import merged
from batchinfer.models.spec.spec import ExpertsSpec
from batchinfer_kernels.experts import Choice


class RangedExperts(Experts):
    """All experts of a layer: each rank computes those that it has, and what they give is added up over all ranks.

    All ranks choose alike, as the router is on each. Where it is `exact`, each result is sent, and they are weighted
    and added by the operator that one process adds them with, in the order of the choice; else each rank adds up its
    own, and the sums of the ranks are added.
    """

    def __init__(self, inner: Experts, ops: Ops, spec: ExpertsSpec, group: Group, exact: bool) -> None:
        """`inner`: the experts that the rank has, numbered from 0 on."""
        self.loads = torch.zeros(spec.routing.experts, dtype=torch.int64, device=inner.loads.device)
        self._inner, self._ops, self._held = inner, ops, spec.numbers
        self._group, self._exact = group, exact

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        add_loads(self.loads, choice.experts, counted)
        made = self._made(x, choice)
        if self._exact:
            return self._ops.combine(merged(made, self._group), choice.weights)
        return self._group.all_reduce(self._ops.combine(made, choice.weights))

    def _made(self, x: Tensor, choice: Choice) -> Tensor:
        """Return (T × chosen, N), the result of each token's experts in the order of its choice, unweighted; zeros for
        those of other ranks."""
        chosen = choice.experts.shape[1]
        numbers = choice.experts.flatten() - self._held.start
        own = (numbers >= 0) & (numbers < len(self._held))
        if not self._inner.skips:
            return self._made_of(x, numbers, own.nonzero().flatten(), chosen)
        rows, none = x.repeat_interleave(chosen, 0), len(self._held)
        found = self._each(rows, torch.where(own, numbers, none))
        return torch.where(own[:, None], found, torch.zeros((), dtype=found.dtype, device=found.device))

    def _made_of(self, x: Tensor, numbers: Tensor, own: Tensor, chosen: int) -> Tensor:
        made = x.new_zeros(len(numbers), x.shape[1])
        if len(own):
            made[own] = self._each(x[own // chosen], numbers[own])
        return made

    def _each(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Compute each row with one expert, whose result keeps its bits: its weight is 1."""
        ones = torch.ones(len(rows), 1, device=rows.device)
        return self._inner(rows, Choice(numbers[:, None], ones))
