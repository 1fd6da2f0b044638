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
    """K and V of one layer, (blocks, kv_heads, block_size, head_dim) each; how values lie within a block is the
    business of the operators that allocated it, which may round its two inner sizes up. Where the layer keeps latents,
    (blocks, 1, block_size, dim), both are the same tensor. Quantised values have scales, (blocks, kv_heads,
    block_size) float32."""

    k: Tensor
    v: Tensor
    block_size: int
    group: int = 0  # which of the step's block tables say where its blocks are
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """The scales of quantised K and V; None: they are not quantised."""
        return None if self.k_scale is None or self.v_scale is None else (self.k_scale, self.v_scale)

    @property
    def copied(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All that a copied token consists of, K and V, as caches of four dimensions."""
        yield self.k, self.v
        if self.scales is not None:
            k_scale, v_scale = self.scales
            yield k_scale[..., None], v_scale[..., None]


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Positions and cache slots of a step's tokens: T tokens of S sequences, one chunk a sequence, in order; for the
    layers of one cache group.

    Lengths are plain ints: the host made them, and no operator should have to ask the device for them.
    """

    positions: Tensor  # (T,) int64: position of each token in its sequence
    slots: Tensor  # (T,) int64: where its K and V go, block * block_size + offset
    block_tables: Tensor  # (S, max blocks) int32, padded with 0
    query_lens: list[int]  # (S,) tokens of the sequence in this step
    context_lens: list[int]  # (S,) cached tokens of the sequence, this step's included
    host_tables: StepTables | None = None  # the block tables where the host can read them
    # Where padding rows write to, which are nobody's tokens; None: there are none
    padding_slot: int | None = None
    # False: of blocks that a window has left the tables say nothing, and no operator reads them
    whole: bool = True
    # Of blocks that are copied once K and V are stored; see batchinfer_kernels.copy_parts
    parts: Tensor | None = None
    token_types: Tensor | None = None  # (T,) int64, of an encoder; None: all are 0
    # (T,) int64: the number of each token's adapter, from 1 on; 0: it has none. None: no token has one
    adapters: Tensor | None = None
    adapted: AdaptedRows | None = None  # the same, sorted: the decoder sets it for its layers
    # Which keys tokens see, where some are in trees of drafts; None: all up to their own
    tree: TreeMask | None = None


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin per position, (max positions, pairs) float32, any attention scaling multiplied in. A pair of a head's
    values is (i, i + pairs), or (2i, 2i + 1) where it is `interleaved`."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class HeadTurn:
    """The rotation of a layer's heads, and the RMSNorms that they pass before: weights of q and of k (D,), or None for
    no norm."""

    rope: RopeTable
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0  # is added to the weights


# The sliding windows of layers; None: a layer sees all keys
Windows: TypeAlias = frozenset[int | None]


class AttentionPlan(ABC):
    """Prepared by an implementation once a step, and read in every layer."""

    padded_tokens: int  # query positions computed only as padding


class FixedPlan(AttentionPlan):
    """A plan whose launches are the same for every step with the same `sizes`, so that a graph can replay them."""

    @property
    @abstractmethod
    def sizes(self) -> Hashable:
        """Return the sizes that launches depend on, besides the number of rows and the bound of the contexts."""

    def place(self) -> None:
        """Put on the device what a graph reads, before its launches are captured."""

    @abstractmethod
    def refill(self, other: FixedPlan) -> None:
        """Take over another step's values; its sizes are the same. Plans of one step are refilled together."""

    @property
    def contexts(self) -> Tensor | None:
        """Return where launches read how many keys each sequence has, (rows,) int32; None: they do not."""
        return None

    def serves(self, context_lens: Sequence[int]) -> bool:
        """Whether launches are right for the same sequences one token further and so on up to these contexts, with what
        the plan holds now, `contexts` apart. `context_lens`: of all rows."""
        return False
