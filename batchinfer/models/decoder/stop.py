"""Where a decoder stops on its way through its layers, and what it leaves there: see `Decoder.passing`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from batchinfer.models.decoder.attention import AttentionHalf
from batchinfer.models.ops.interface import LayerCache


@dataclass(frozen=True, slots=True, eq=False)
class Stop:
    """Before the attention of a layer, whose cache holds K and V of the step's tokens."""

    queries: Tensor  # (T, heads, dim)
    attention: AttentionHalf
    cache: LayerCache


@dataclass(frozen=True, slots=True, eq=False)
class StepRoom:
    """Tensors for what steps of up to so many tokens have at each stop, and at the end."""

    tokens: int
    queries: Tensor  # (tokens × the widest queries,)
    attended: Tensor  # (tokens × the widest result of attention,)
    hidden: Tensor  # (tokens, hidden)
