"""Operators that use torch only: they run on every device that torch supports, in any dtype."""

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

# The BLAS rounds float32 products of fewer rows differently. With padding to eight rows, a row's results are almost
# independent of the number of rows.
MIN_ROWS = 8
# Values of a head's weight that are widened to float32 at a time: a whole vocabulary would take gigabytes
WIDENED_VALUES = 1 << 24


class TorchLinear(Linear):
    """A linear layer with a float weight, multiplied by torch. Inputs are padded to at least MIN_ROWS rows.

    With padding, the results of a row hardly depend on the number of rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Create the layer.

        Args:
            weight: (outputs, inputs).
            bias: (outputs,). None: there is none.

        Raises:
            ValueError: The shapes do not match.
        """
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            raise ValueError(f"weight {tuple(weight.shape)} is not a matrix, or its bias does not fit")
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer to x, (tokens, in_features), and return (tokens, out_features)."""
        rows = x.shape[0]
        if rows >= MIN_ROWS:
            return F.linear(x, self._weight, self._bias)
        return F.linear(F.pad(x, (0, 0, 0, MIN_ROWS - rows)), self._weight, self._bias)[:rows]


class TorchHead(Head):
    """An output layer (lm_head) that computes logits in float32 for weights of any dtype.

    It computes parts of the vocabulary sequentially to limit memory.
    """

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._parts = torch.split(weight, max(1, WIDENED_VALUES // self.in_features))

    def __call__(self, x: Tensor) -> Tensor:
        """Return float32 logits (n, vocab) from normed hidden states x, (n, hidden)."""
        wide = x.float()
        return torch.cat([TorchLinear(part.float(), None)(wide) for part in self._parts], dim=-1)


class ExactLinear(TorchLinear):
    """A linear layer that computes in float32 for weights of any dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.float(), None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer to x, (tokens, in_features), and return (tokens, out_features) in float32."""
        return super().__call__(x.float())


class TorchExperts(Experts):
    """The experts of a layer, computed sequentially by torch. The host waits for the number of rows of each expert."""

    def __init__(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> None:
        self.loads = torch.zeros(len(gate_up.weight), dtype=torch.int64, device=gate_up.weight.device)
        self._halves = [
            tuple(TorchLinear(w.weight[e], None if w.bias is None else w.bias[e]) for w in (gate_up, down))
            for e in range(len(self.loads))
        ]
        self._activation = activation

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the results of each token's experts, (tokens, hidden).

        Args:
            x: (tokens, hidden).
            choice: The experts that the router chose for each token, and their weights.
            counted: (tokens,) bool, the tokens to count in `loads`, such as all except padding. None: all tokens.
        """
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
    """Add the number of tokens that choose each expert to `loads`, in place.

    Args:
        loads: (experts,) int64.
        experts: (tokens, chosen) int64, the experts that the router chose for each token.
        counted: (tokens,) bool, the tokens to count. None: all.
    """
    each = torch.ones_like(experts) if counted is None else counted[:, None].expand_as(experts).long()
    loads.index_add_(0, experts.flatten(), each.flatten())


class TorchHeads(HeadsLinear):
    """A linear layer with a matrix of its own for each attention head, computed by one einsum."""

    def __init__(self, weight: Tensor) -> None:
        """Create the layer.

        Args:
            weight: (heads, outputs, inputs), the matrices of the heads.
        """
        self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply each head of x by the head's matrix, and return (tokens, heads, outputs).

        Args:
            x: (tokens, heads, inputs).
        """
        return torch.einsum("thi,hoi->tho", x, self._weight)


class TorchAdapters(Adapters):
    """A and B of LoRA adapters for one matrix product, multiplied by torch adapter by adapter.

    The host waits for the number of tokens of each adapter.
    """

    def __init__(self, factors: Sequence[Factors | None], room: AdapterRoom | None = None) -> None:
        self._kept, self._room = [None if own is None else (own.a, own.b) for own in factors], room
        empty: list[tuple[Tensor, Tensor] | None] = [None] * (0 if room is None else room.places)
        self._factors = empty or [*self._kept]
        self._outputs = next(len(own.b) for own in factors if own is not None)

    def __call__(self, x: Tensor, rows: AdaptedRows) -> AddedValues:
        """Return B A x of each token's LoRA adapter; see `Adapters.__call__`."""
        starts = rows.starts[1:] - rows.starts[1]
        own = x[rows.order[int(rows.starts[1]) :]]
        return AddedValues(low_rank_reference(own, self._factors, starts, self._outputs), rows)

    def place(self, number: int, place: int) -> None:
        """Copy A and B of an adapter to the device, over the adapter that has the same place.

        Args:
            number: The number of the adapter, from 1.
            place: The number of the place, from 1.
        """
        kept, room = self._kept[number - 1], self._room
        assert room is not None, "without a room, all adapters have places already"
        self._factors[place - 1] = (
            None if kept is None else (kept[0].to(room.device), kept[1].to(room.device))
        )


class GroupedPlan(AttentionPlan):
    """A plan of attention by torch, which computes sequences of a similar shape together as a group."""

    def __init__(self, groups: list[AttentionGroup], tokens: int) -> None:
        """Create the plan.

        Args:
            groups: The groups of sequences.
            tokens: The number of tokens of the step.
        """
        self.groups = groups
        self.padded_tokens = sum(g.shape[0] * g.shape[1] for g in groups) - tokens


class TorchOps(Ops):
    """Operators that use torch only, for devices and dtypes without kernels of batchinfer."""

    name = "torch"

    def __init__(self, causal: bool = True) -> None:
        """Create operators that use torch only.

        Args:
            causal: False for an encoder: tokens also attend to later tokens, and steps must have whole sequences.
        """
        self._causal = causal

    def pack_linear(self, weight: Weight, bias: Tensor | None = None) -> Linear:
        """Return a linear layer with a float weight.

        Args:
            weight: (outputs, inputs).
            bias: (outputs,). None: there is none.

        Raises:
            TypeError: The weight is quantised.
        """
        return TorchLinear(values_of(weight, self.name), bias)

    def pack_head(self, weight: Weight) -> Head:
        """Return the output layer, which computes float32 logits (tokens, vocab) from its float weight (vocab, inputs).

        Raises:
            TypeError: The weight is quantised.
        """
        return TorchHead(values_of(weight, self.name))

    def pack_exact(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return a linear layer that computes in float32 with an unquantised weight, such as a router.

        Args:
            weight: (outputs, inputs).
            bias: (outputs,). None: there is none.
        """
        return ExactLinear(weight, bias)

    def pack_experts(self, gate_up: ExpertWeights, down: ExpertWeights, activation: Activation) -> Experts:
        """Return the experts of a layer, gated feed-forward networks with float weights; see `Ops.pack_experts`."""
        return TorchExperts(gate_up, down, activation)

    def pack_adapters(self, factors: Sequence[Factors | None], room: AdapterRoom | None = None) -> Adapters:
        """Return A and B of LoRA adapters for one matrix product.

        Args:
            factors: A and B of each adapter, or None for an adapter that does not change the product.
            room: How many adapters the device holds at the same time. `Adapters.place` must copy them there. None: all
                adapters are on the device from the start.
        """
        return TorchAdapters(factors, room)

    def pack_heads(self, weights: ExpertWeights) -> HeadsLinear:
        """Return a linear layer with a float matrix of its own for each attention head.

        Args:
            weights: The matrices (heads, outputs, inputs).
        """
        return TorchHeads(weights.weight)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return (RMSNorm of x + residual, x + residual), each like x.

        Args:
            x: (..., hidden).
            weight: (hidden,).
            eps: A number to add to the mean square.
            residual: (..., hidden), which is added to x before the norm. None: it is 0.
            offset: A number to add to the weight, such as Gemma's 1.
        """
        return rms_norm_reference(x, weight, eps, residual, offset)

    def rope_store(
        self, q: Tensor, k: Tensor, v: Tensor, turn: HeadTurn, inputs: AttentionInputs, cache: LayerCache
    ) -> Tensor:
        """Norm and rotate q and k as `turn` states, write k and v to the cache, and return the rotated q.

        q, k and v are (tokens, heads, head size).
        """
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
        """Return normed and rotated q, (tokens, query heads, head size), without writing to a cache; see `Ops.rope`."""
        cos, sin = turn.rope.cos[inputs.positions], turn.rope.sin[inputs.positions]
        return rope_reference(
            q, cos, sin, turn.q_norm, turn.eps, offset=turn.offset, interleaved=turn.rope.interleaved
        )

    @property
    def follows_trees(self) -> bool:
        """Return True if steps may contain draft trees: for a decoder."""
        return self._causal

    def plan_attention(
        self,
        inputs: AttentionInputs,
        block_size: int,
        windows: Windows,
        other_group: AttentionPlan | None = None,
    ) -> AttentionPlan:
        """Group the sequences of a step by shape, as its attention plan; see `Ops.plan_attention`.

        `other_group` is not used.
        """
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
        """Return the result of attention over cached K and V, (tokens, query heads, head size); see `Ops.attention`.

        Raises:
            TypeError: The plan was made by other operators.
        """
        if not isinstance(plan, GroupedPlan):
            raise TypeError(f"{type(plan).__name__} was not made by {self.name} operators")
        found = grouped_attention(q, cache.k, cache.v, plan.groups, rules)
        return write_result(found, out)

    def absorbed_attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, rank: int
    ) -> Tensor:
        """Return the attention-weighted sums of cached latents, (tokens, heads, rank).

        Args:
            q: (tokens, heads, rank + R), queries multiplied by the weights of K, and R rotated values.
            cache: The layer's cache.
            plan: The result of `plan_attention`.
            scale: The factor of scores.
            rank: The number of values of a latent.

        Raises:
            TypeError: The plan was made by other operators.
        """
        if not isinstance(plan, GroupedPlan):
            raise TypeError(f"{type(plan).__name__} was not made by {self.name} operators")
        return grouped_latent_attention(q, cache.k, plan.groups, scale, rank)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """Return act(gate) * up, (tokens, size).

        Args:
            gate_up: (tokens, 2 * size), gate before up.
            activation: The activation of gate.
        """
        return gated_activation_reference(gate_up, activation)
