"""The tables of learned positions, and of learned numbers that distances add to scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchinfer.models.checkpoint.weights import Tables
from batchinfer.models.spec.spec import BUCKETS, ModelSpec

TYPES = 2  # that tokens may have: those of one text are 0, and those of a second one 1
FARTHEST = 128  # the distance from which on all keys share a bucket


def position_table(spec: ModelSpec, tables: Tables) -> Tensor | None:
    """Return what is added to the embedding of the token at each position, (max positions, hidden): its position's;
    where there are types, (types x max positions, hidden), for each of the first TYPES as many rows, with its
    embedding added. None: nothing."""
    if tables.positions is None or spec.encoder is None:
        return tables.positions
    positions = tables.positions[spec.encoder.first_position :]
    if tables.token_types is None:
        return positions
    return torch.cat([positions + of_type for of_type in tables.token_types[:TYPES]])


def distance_table(learned: Tensor, max_positions: int) -> Tensor:
    """learned: (buckets, heads) → (heads, 2 x max_positions) float32, at max_positions + d the number for a key that
    comes d positions after a query."""
    distances = torch.arange(-max_positions, max_positions, device=learned.device)
    return learned[distance_buckets(distances)].float().t().contiguous()


def distance_buckets(distances: Tensor) -> Tensor:
    """Return the bucket of each distance, int64: near ones have one each, farther ones share them by their logarithm
    (Raffel et al., 2020); later keys have those of the upper half."""
    side, exact = BUCKETS // 2, BUCKETS // 4
    far = distances.abs()
    wide = torch.log(far.clamp(min=1).float() / exact) / math.log(FARTHEST / exact) * (side - exact)
    shared = (exact + wide.long()).clamp(max=side - 1)
    return torch.where(far < exact, far, shared) + side * (distances > 0)
