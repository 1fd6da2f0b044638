"""The inputs of attention in a step: positions, caches, rotations and plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from batchinfer_kernels.draft_tree import TreeMask
from batchinfer_kernels.low_rank import AdaptedRows
from batchinfer_kernels.sample import NO_TOKEN as NO_TOKEN
from batchinfer_kernels.step_tables import StepTables


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cached K and V of one layer, divided into blocks of tokens.

    The operators that allocate a cache choose the order of values within a block, and may round up block_size and
    head_dim.

    Attributes:
        k: (blocks, kv_heads, block_size, head_dim). A layer that caches latents has one tensor with kv_heads = 1, which
            is both `k` and `v`.
        v: As `k`.
        block_size: The number of tokens in a block.
        group: The index of the layer's cache group. Layers of a group use the same block tables.
        k_scale: (blocks, kv_heads, block_size) float32, the scales of quantised K. None: K is not quantised.
        v_scale: As `k_scale`.
    """

    k: Tensor
    v: Tensor
    block_size: int
    group: int = 0
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Return the scales of quantised K and V; None if they are not quantised."""
        return None if self.k_scale is None or self.v_scale is None else (self.k_scale, self.v_scale)

    @property
    def copied(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of tensors: K and V and, for a quantised cache, the scales of K and V.

        To move a token within the cache, its values in all of these tensors must be copied. Each tensor is (blocks,
        heads, block_size, values).
        """
        yield self.k, self.v
        if self.scales is not None:
            k_scale, v_scale = self.scales
            yield k_scale[..., None], v_scale[..., None]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Positions and cache slots of a step's tokens, for the layers of one cache group.

    The T tokens belong to S sequences, in order, with one chunk per sequence. Lengths are Python integers, so that no
    operator has to copy them from the device.

    Attributes:
        positions: (T,) int64, the position of each token in its sequence.
        slots: (T,) int64, the slot for the K and V of each token: block * block_size + offset in the block.
        block_tables: (S, maximum blocks) int32, the blocks of each sequence, padded with 0.
        query_lens: (S,), the number of tokens of each sequence in this step.
        context_lens: (S,), the number of cached tokens of each sequence, including the tokens of this step.
        host_tables: The block tables in the host's memory. None: they are only on the device.
        padding_slot: The slot that padding rows write to. None: there are no padding rows.
        keeps_all: False if the block tables lack the blocks of tokens before the sliding window.
        parts: (n, 4) int64, the tokens to copy from one block to another after K and V are stored: source block, target
            block, first offset, end offset. None: there are none.
        token_types: (T,) int64, the token types of an encoder. None: all are 0.
        adapters: (T,) int64, the number of each token's LoRA adapter, or 0. None: no token has an adapter.
        adapted: The tokens sorted by adapter. The decoder computes them from `adapters`.
        tree: The keys that each token of a draft tree attends to. None: each token attends to all keys up to its own.
    """

    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    query_lens: list[int]
    context_lens: list[int]
    host_tables: StepTables | None = None
    padding_slot: int | None = None
    keeps_all: bool = True
    parts: Tensor | None = None
    token_types: Tensor | None = None
    adapters: Tensor | None = None
    adapted: AdaptedRows | None = None
    tree: TreeMask | None = None


@dataclass(frozen=True, slots=True)
class RopeTable:
    """The cosines and sines of a rotary embedding, by position.

    Attributes:
        cos: (maximum positions, pairs) float32, multiplied by the attention factor of YaRN or LongRoPE.
        sin: As `cos`.
        interleaved: True if values 2i and 2i + 1 of a head form a pair, False for i and i + pairs.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class HeadTurn:
    """The rotary embedding of a layer's q and k, and their RMSNorms per head, which are computed before the rotation.

    Attributes:
        rope: Cosines and sines of the rotation.
        q_norm: (head size,), the weight of q's norm. None: there are no norms.
        k_norm: As `q_norm`, for k.
        eps: The epsilon of the norms.
        offset: A number to add to the weights of the norms.
    """

    rope: RopeTable
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0


# The sliding windows of layers, with None for a layer that attends to all keys
Windows: TypeAlias = frozenset[int | None]


class AttentionPlan(ABC):
    """A plan of a step's attention, such as its work items. Operators prepare it once per step, and all layers read it.

    Attributes:
        padded_tokens: The number of query positions that the kernels compute only as padding, for statistics.
    """

    padded_tokens: int


class FixedPlan(AttentionPlan):
    """A plan of attention that a CUDA graph can replay, as all steps with equal `sizes` launch the same kernels."""

    @property
    @abstractmethod
    def sizes(self) -> Hashable:
        """Return the sizes on which attention's kernel launches depend.

        Steps with equal sizes and equal numbers of rows can share a CUDA graph.
        """

    def place(self) -> None:
        """Copy the plan to the device, before a CUDA graph that reads it is captured."""

    @abstractmethod
    def refill(self, other: FixedPlan) -> None:
        """Copy another step's plan into this plan's tensors, which a CUDA graph reads, before the graph is replayed.

        Args:
            other: A plan with equal `sizes`.
        """

    @property
    def contexts(self) -> Tensor | None:
        """Return the tensor of context lengths that attention reads, (rows,) int32; None if it reads none.

        Multi-step decoding increases the lengths on the device, so that one plan fits several steps.
        """
        return None

    def serves(self, context_lens: Sequence[int]) -> bool:
        """Return True if later decode steps of the same sequences can use this plan by updating only `contexts`.

        Args:
            context_lens: The maximum context length of each sequence in these steps.
        """
        return False
