"""Operators made of torch's own: runs wherever torch does, in any dtype."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, HeadTurn, LayerCache, Windows
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.layers import (
    AdapterRoom,
    Adapters,
    AddedValues,
    Experts,
    ExpertWeights,
    Factors,
    Head,
    HeadsLinear,
    Linear,
    Weight,
    values_of,
    write_result,
)
from batchinfer_kernels.cpu.paged_attention import (
    AttentionGroup,
    SequenceShape,
    build_group,
    group_sequences,
    grouped_attention,
    grouped_latent_attention,
)
from batchinfer_kernels.experts import Choice, combine_reference, group_by_expert
from batchinfer_kernels.gated_activation import Activation, gated_activation_reference
from batchinfer_kernels.low_rank import AdaptedRows, low_rank_reference
from batchinfer_kernels.paged_attention import ScoreRules
from batchinfer_kernels.rms_norm import rms_norm_reference
from batchinfer_kernels.rope_store import rope_reference, rope_store_reference

# A float32 matrix product of fewer rows goes another way through the BLAS and rounds differently: padding to
# eight rows makes a row's numbers (almost) independent of how many rows it is computed with.
MIN_ROWS = 8
# Values of a head's weight that are widened to float32 at a time: a whole vocabulary would take gigabytes
WIDENED_VALUES = 1 << 24


class TorchLinear(Linear):
    """The weight as it was loaded."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise ValueError(f"weight {tuple(weight.shape)} is not a matrix, or its bias does not fit")
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows >= MIN_ROWS:
            return F.linear(x, self._weight, self._bias)
        return F.linear(F.pad(x, (0, 0, 0, MIN_ROWS - rows)), self._weight, self._bias)[:rows]


class TorchHead(Head):
    """Logits as float32 sums of float32 products, whatever dtype the weight has."""

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._parts = torch.split(weight, max(1, WIDENED_VALUES // self.in_features))

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        return torch.cat([TorchLinear(part.float(), None)(wide) for part in self._parts], dim=-1)


class ExactLinear(TorchLinear):
    """A linear layer that computes in float32, whatever dtype the weight has."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.float(), None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x.float())


class TorchExperts(Experts):
    """One expert after the other. The host waits for the number of each one's rows."""

    def __init__(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> None:
        self.loads = torch.zeros(len(gate_up.weight), dtype=torch.int64, device=gate_up.weight.device)
        self._halves = [
            tuple(TorchLinear(w.weight[e], None if w.bias is None else w.bias[e]) for w in (gate_up, down))
            for e in range(len(self.loads))
        ]
        self._activation = activation

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        groups = group_by_expert(choice.experts, len(self.loads))
        add_loads(self.loads, choice.experts, counted)
        rows = x[groups.order // choice.experts.shape[1]]
        made = torch.empty_like(rows)
        for (gate_up, down), (first, end) in zip(self._halves, pairwise(groups.starts.tolist()), strict=True):
            if first < end:
                inner = gated_activation_reference(gate_up(rows[first:end]), self._activation)
                made[first:end] = down(inner)
        return combine_reference(made, groups.order, choice.weights)


def add_loads(loads: Tensor, experts: Tensor, counted: Tensor | None) -> None:
    """Counts each token's experts, of those tokens that are `counted` if that is given."""
    each = torch.ones_like(experts) if counted is None else counted[:, None].expand_as(experts).long()
    loads.index_add_(0, experts.flatten(), each.flatten())


class TorchHeads(HeadsLinear):
    """One product for all heads."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.einsum("thi,hoi->tho", x, self._weight)


class TorchAdapters(Adapters):
    """Low-rank products of one adapter after the other. The host waits for the number of each one's tokens."""

    def __init__(self, factors: Sequence[Factors | None], room: AdapterRoom | None = None) -> None:
        self._kept, self._room = [None if own is None else (own.a, own.b) for own in factors], room
        empty: list[tuple[Tensor, Tensor] | None] = [None] * (0 if room is None else room.places)
        self._factors = empty or [*self._kept]
        self._outputs = next(len(own.b) for own in factors if own is not None)

    def __call__(self, x: Tensor, rows: AdaptedRows) -> AddedValues:
        starts = rows.starts[1:] - rows.starts[1]
        own = x[rows.order[int(rows.starts[1]) :]]
        return AddedValues(low_rank_reference(own, self._factors, starts, self._outputs), rows)

    def place(self, number: int, place: int) -> None:
        kept, room = self._kept[number - 1], self._room
        assert room is not None, "each has its place"
        self._factors[place - 1] = (
            None if kept is None else (kept[0].to(room.device), kept[1].to(room.device))
        )


class GroupedPlan(AttentionPlan):
    """The step's sequences, grouped by shape."""

    def __init__(self, groups: list[AttentionGroup], tokens: int) -> None:
        self.groups = groups
        self.padded_tokens = sum(g.shape[0] * g.shape[1] for g in groups) - tokens


class TorchOps(Ops):
    """The implementation for every device that has no kernels of its own. Not `causal`, tokens see later ones, too, and
    every step has whole sequences."""

    name = "torch"

    def __init__(self, causal: bool = True) -> None:
        self._causal = causal

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        return TorchLinear(values_of(weight, self.name), bias)

    def pack_head(self, weight: Weight) -> Head:
        return TorchHead(values_of(weight, self.name))

    def pack_exact(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return ExactLinear(weight, bias)

    def pack_experts(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> Experts:
        return TorchExperts(gate_up, down, activation)

    def pack_adapters(self, factors: Sequence[Factors | None], room: AdapterRoom | None = None) -> Adapters:
        return TorchAdapters(factors, room)

    def pack_heads(self, weights: ExpertWeights) -> HeadsLinear:
        return TorchHeads(weights.weight)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        return rms_norm_reference(x, weight, eps, residual, offset)

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn, inputs: AttentionInputs, cache: LayerCache
    ) -> Tensor:
        cos, sin = turn.rope.cos[inputs.positions], turn.rope.sin[inputs.positions]
        return rope_store_reference(
            q,
            k,
            v,
            cos,
            sin,
            cache.k,
            cache.v,
            inputs.slots,
            turn.q_norm,
            turn.k_norm,
            turn.eps,
            offset=turn.offset,
            interleaved=turn.rope.interleaved,
        )

    def rope(self, q: Tensor, turn: HeadTurn, inputs: AttentionInputs) -> Tensor:
        cos, sin = turn.rope.cos[inputs.positions], turn.rope.sin[inputs.positions]
        return rope_reference(
            q, cos, sin, turn.q_norm, turn.eps, offset=turn.offset, interleaved=turn.rope.interleaved
        )

    @property
    def follows_trees(self) -> bool:
        return self._causal

    def plan_attention(
        self, inputs: AttentionInputs, block_size: int, windows: Windows, beside: AttentionPlan | None = None
    ) -> AttentionPlan:
        shapes, start = [], 0
        for row, (queries, context) in enumerate(zip(inputs.query_lens, inputs.context_lens, strict=True)):
            shapes.append(SequenceShape(row, start, queries, context))
            start += queries
        members, causal = group_sequences(shapes, self._causal), self._causal
        tables, tree = inputs.block_tables, inputs.tree
        self.check_tree(inputs, windows)
        made = [build_group(m, tables, block_size, windows, causal, tree) for m in members]
        return GroupedPlan(made, start)

    def attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, rules: ScoreRules, out: Tensor | None = None
    ) -> Tensor:
        if not isinstance(plan, GroupedPlan):
            raise TypeError(f"{type(plan).__name__} was not made by {self.name} operators")
        found = grouped_attention(q, cache.k, cache.v, plan.groups, rules)
        return write_result(found, out)

    def absorbed_attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, rank: int
    ) -> Tensor:
        if not isinstance(plan, GroupedPlan):
            raise TypeError(f"{type(plan).__name__} was not made by {self.name} operators")
        return grouped_latent_attention(q, cache.k, plan.groups, scale, rank)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gated_activation_reference(gate_up, activation)
