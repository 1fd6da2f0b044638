"""A decoder's forward pass, split at attention: see `Decoder.forward_split_at_attention`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchinfer.models.decoder.attention import AttentionHalf
from batchinfer.models.ops.interface import LayerCache


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBoundary:
    """The point before the attention of a layer, whose cache holds K and V of the step's tokens by then."""

    queries: Tensor  # (T, heads, dim)
    attention: AttentionHalf
    cache: LayerCache


@dataclass(frozen=True, slots=True, eq=False)
class StaticBuffers:
    """Tensors that hold, for steps of up to `tokens` tokens, what is passed on at each boundary and at the end."""

    tokens: int
    queries: Tensor  # (tokens × the widest queries,)
    attended: Tensor  # (tokens × the widest result of attention,)
    hidden: Tensor  # (tokens, hidden)
