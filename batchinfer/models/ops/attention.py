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
    """The cached K and V of one layer.

    The operators that allocate a cache choose the layout within a block and may round up block_size and head_dim.

    Attributes:
        k: (blocks, kv_heads, block_size, head_dim). A layer that caches latents uses one tensor with kv_heads = 1 for
            both.
        v: As `k`.
        block_size: The number of tokens in a block.
        group: The number of the layer's cache group, whose block tables it uses.
        k_scale: (blocks, kv_heads, block_size) float32, the scales of quantised K, or None.
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
        """Return the scales of quantised K and V, or None if they are not quantised."""
        return None if self.k_scale is None or self.v_scale is None else (self.k_scale, self.v_scale)

    @property
    def copied(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (K, V), and for a quantised cache (K scales, V scales), each with 4 dimensions, to copy tokens."""
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
        slots: (T,) int64, the slot for the K and V of each token, block * block_size + offset.
        block_tables: (S, maximum blocks) int32, padded with 0.
        query_lens: (S,), the tokens of each sequence in this step.
        context_lens: (S,), the cached tokens of each sequence, including this step's.
        host_tables: The block tables in the host's memory, or None.
        padding_slot: The slot that padding rows write to, or None without padding rows.
        keeps_all: False if the tables lack the blocks before a window, which no operator reads.
        parts: (n, 4) int64, parts of blocks to copy after K and V are stored; see batchinfer_kernels.copy_parts.
        token_types: (T,) int64, token types of an encoder, or None if all are 0.
        adapters: (T,) int64, the number of each token's adapter, or 0 for none. None if no token has an adapter.
        adapted: The tokens sorted by adapter, which the decoder sets for its layers.
        tree: The keys that each token attends to in a draft tree, or None if each attends to all keys up to its own.
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
    """The cos and sin of rotary embeddings.

    Attributes:
        cos: (maximum positions, pairs) float32, times any attention scaling.
        sin: As `cos`.
        interleaved: True if values 2i and 2i + 1 of a head form a pair, False for i and i + pairs.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class HeadTurn:
    """The rotation of a layer's heads, and the RMSNorms of q and k before the rotation.

    Attributes:
        rope: The table of the rotation.
        q_norm: (head size,), the weight of q's norm, or None for no norm.
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
    """A plan that an implementation of attention prepares once per step and reads in every layer.

    Attributes:
        padded_tokens: The number of query positions that are computed only as padding.
    """

    padded_tokens: int


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
        """Copy the values of another step's plan with the same sizes into this plan's tensors.

        All plans of a step must be refilled together.
        """

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
