"""The inputs of attention in a step: positions, caches, rotations, rules of scores, and plans."""

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
    """The cached K and V of one layer, each (blocks, kv_heads, block_size, head_dim).

    The operators that allocate a cache choose the layout within a block and may round up the two inner sizes. A layer
    that caches latents uses one tensor (blocks, 1, block_size, dim) as both. Quantised values have scales (blocks,
    kv_heads, block_size) float32.
    """

    k: Tensor
    v: Tensor
    block_size: int
    group: int = 0  # which of the step's block tables say where its blocks are
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """Return the scales of quantised K and V, or None if they are not quantised."""
        return None if self.k_scale is None or self.v_scale is None else (self.k_scale, self.v_scale)

    @property
    def copied(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the pairs of K and V tensors, and of their scales, to copy with a token, each with 4 dimensions."""
        yield self.k, self.v
        if self.scales is not None:
            k_scale, v_scale = self.scales
            yield k_scale[..., None], v_scale[..., None]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Positions and cache slots of a step's tokens, for the layers of one cache group.

    The T tokens belong to S sequences, in order, with one chunk per sequence. Lengths are Python integers, so that no
    operator has to copy them from the device.
    """

    positions: Tensor  # (T,) int64: position of each token in its sequence
    slots: Tensor  # (T,) int64: where its K and V go, block * block_size + offset
    block_tables: Tensor  # (S, max blocks) int32, padded with 0
    query_lens: list[int]  # (S,) tokens of the sequence in this step
    context_lens: list[int]  # (S,) cached tokens of the sequence, this step's included
    host_tables: StepTables | None = None  # the block tables where the host can read them
    # The slot that padding rows write to; None without padding rows
    padding_slot: int | None = None
    # False if the tables lack the blocks that a window has left, which no operator reads
    whole: bool = True
    # Parts of blocks to copy after K and V are stored; see batchinfer_kernels.copy_parts
    parts: Tensor | None = None
    token_types: Tensor | None = None  # (T,) int64, of an encoder; None: all are 0
    # (T,) int64: the number of each token's adapter, or 0 without one; None if no token has an adapter
    adapters: Tensor | None = None
    adapted: AdaptedRows | None = None  # the same, sorted: the decoder sets it for its layers
    # The keys that each token attends to in a draft tree; None if each token attends to all keys up to its own
    tree: TreeMask | None = None


@dataclass(frozen=True, slots=True)
class RopeTable:
    """The cos and sin of rotary embeddings, each (max positions, pairs) float32, times any attention scaling.

    Values i and i + pairs of a head form a pair, or 2i and 2i + 1 if the table is `interleaved`.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class HeadTurn:
    """The rotation of a layer's heads, and the RMSNorms of q and k before it: weights (D,), or None for no norm."""

    rope: RopeTable
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0  # is added to the weights


# The sliding windows of layers; None: a layer sees all keys
Windows: TypeAlias = frozenset[int | None]


class AttentionPlan(ABC):
    """A plan that an implementation of attention prepares once per step and reads in every layer."""

    padded_tokens: int  # query positions computed only as padding


class FixedPlan(AttentionPlan):
    """A plan whose launches are the same for every step with the same `sizes`, so that a graph can replay them."""

    @property
    @abstractmethod
    def sizes(self) -> Hashable:
        """Return the sizes that launches depend on, except the number of rows and the context limit."""

    def place(self) -> None:
        """Copy the values that a graph reads to the device, before its launches are captured."""

    @abstractmethod
    def refill(self, other: FixedPlan) -> None:
        """Copy the values of another step's plan with the same sizes. Plans of one step are refilled together."""

    @property
    def contexts(self) -> Tensor | None:
        """Return the tensor (rows,) int32 of context lengths that launches read, or None if they read none."""
        return None

    def serves(self, context_lens: Sequence[int]) -> bool:
        """Return True if the plan also fits later steps of the same sequences when only `contexts` is updated.

        Args:
            context_lens: The longest context to check for, of each row.
        """
        return False
