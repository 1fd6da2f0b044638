"""The tables of positions: rotations, learned embeddings, and numbers that distances add to scores.

Rotations are equal to those of transformers' ROPE_INIT_FUNCTIONS.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchinfer.models.checkpoint.weights import Tables
from batchinfer.models.ops.attention import RopeTable
from batchinfer.models.spec.rope_config import RopeConfig
from batchinfer.models.spec.spec import BUCKETS, ModelSpec, Rotation

TYPES = 2  # that tokens may have: those of one text are 0, and those of a second one 1
FARTHEST = 128  # the distance from which on all keys share a bucket


def rope_table(rotation: Rotation, max_positions: int, device: torch.device | str) -> RopeTable:
    """cos and sin of positions 0 … max_positions - 1, each (max_positions, rotary_dim / 2) float32.

    Computed on the CPU, so that every device multiplies the same numbers; YaRN's attention factor is in them. Where
    nothing is rotated, one pair of each head is, by an angle of 0. LongRoPE's table has max_positions rows more: those
    for sequences that may grow beyond the positions that the model was first made for.
    """
    if rotation.rope is None:
        cos = torch.ones(max_positions, 1, device=device)
        return RopeTable(cos, torch.zeros_like(cos))
    frequencies = inverse_frequencies(rotation.rope, rotation.dim)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies[..., None, :]
    angles = angles.flatten(0, -2)
    factor = rotation.rope.attention_factor
    cos, sin = ((part * factor).to(device) for part in (angles.cos(), angles.sin()))
    return RopeTable(cos, sin, rotation.interleaved)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """(head_dim / 2,) float32, on the CPU; LongRoPE's are (2, head_dim / 2): short and long."""
    plain = 1.0 / _position_frequencies(rope.theta, head_dim)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "longrope":
        return plain / torch.tensor([rope.short, rope.long])
    if rope.kind == "yarn":
        return _yarn(rope, head_dim)
    return plain


def _position_frequencies(theta: float, head_dim: int) -> Tensor:
    powers: Tensor = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return powers


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves divided by the factor, short ones kept, those between interpolated (Llama 3.1)."""
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
    waves = 2 * math.pi / plain
    scaled = torch.where(waves > original / low, plain / rope.factor, plain)
    smooth = (original / waves - low) / (high - low)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = (waves >= original / high) & (waves <= original / low)
    return torch.where(medium, between, scaled)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """A ramp over the dimensions from extrapolation (fast) to interpolation (slow) (Peng et al., 2023)."""
    powers = _position_frequencies(rope.theta, head_dim)
    low, high = _yarn_range(rope, head_dim)
    width = high - low if high != low else 0.001  # no singularity
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    """The dimensions between which the ramp runs."""
    low, high = (_yarn_dimension(rotations, rope, head_dim) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, head_dim - 1)


def _yarn_dimension(rotations: float, rope: RopeConfig, head_dim: int) -> float:
    """Return the dimension that turns that many times over the original context."""
    turns = rope.original_max_positions / (rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(rope.theta))


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
