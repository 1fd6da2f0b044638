"""The operators that a decoder is made of, and the tensors of a step that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from batchinfer_kernels.gated_activation import Activation


@dataclass(frozen=True, slots=True)
class LayerCache:
    """K and V of one layer: (blocks, kv_heads, block_size, head_dim) each."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Where the tokens of a step stand. T tokens of S sequences, one chunk a sequence, in order.

    Lengths are plain ints: the host made them, and no operator should have to ask the device for them.
    """

    positions: Tensor  # (T,) int64: position of each token in its sequence
    slots: Tensor  # (T,) int64: where its K and V go, block * block_size + offset
    block_tables: Tensor  # (S, max blocks) int32, padded with 0
    query_lens: list[int]  # (S,) tokens of the sequence in this step
    context_lens: list[int]  # (S,) cached tokens of the sequence, this step's included


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin per position, (max positions, head_dim / 2) float32, any attention scaling multiplied in."""

    cos: Tensor
    sin: Tensor


class Linear(ABC):
    """y = x W^T + b with the weight in whatever layout its implementation likes best."""

    in_features: int
    out_features: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in_features) → (T, out_features)."""


class AttentionPlan(ABC):
    """What an implementation prepares once a step and reads in every layer."""

    padded_tokens: int  # query positions computed only as padding


class Ops(ABC):
    """One implementation of every operator; `name` goes into the report."""

    name: str

    @abstractmethod
    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Prepare a weight (out, in) once, at load."""

    @abstractmethod
    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids: (T,) int64; table: (vocab, hidden) → (T, hidden)."""

    @abstractmethod
    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(normalised, x + residual); see batchinfer_kernels.rms_norm."""

    @abstractmethod
    def rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: RopeTable,
        inputs: AttentionInputs,
        cache: LayerCache,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Tensor:
        """Rotated q (T, q_heads, D); k and v (T, kv_heads, D) go to the cache. See batchinfer_kernels.rope_store."""

    @abstractmethod
    def plan_attention(
        self, inputs: AttentionInputs, block_size: int, windows: frozenset[int | None]
    ) -> AttentionPlan:
        """Prepare attention for one step; `windows` are the sliding windows that its layers use."""

    @abstractmethod
    def attention(
        self, q: Tensor, cache: LayerCache, plan: AttentionPlan, scale: float, window: int | None = None
    ) -> Tensor:
        """(T, q_heads, D) → (T, q_heads, D). See batchinfer_kernels.paged_attention."""

    @abstractmethod
    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """(T, 2 × intermediate) → (T, intermediate). See batchinfer_kernels.gated_activation."""
