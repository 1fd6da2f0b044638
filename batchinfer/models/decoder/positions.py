"""Tables of positions: rotations, learned embeddings, and the numbers that distances add to scores.

Rotations are equal to transformers' ROPE_INIT_FUNCTIONS.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchinfer.models.checkpoint.weights import Tables
from batchinfer.models.ops.attention import RopeTable
from batchinfer.models.spec.rope_config import RopeConfig
from batchinfer.models.spec.spec import BUCKETS, ModelSpec, Rotation

TYPES = 2  # token types: 0 for the first text of a pair, 1 for the second
FARTHEST = 128  # all keys at this distance or farther share a bucket


def rope_table(rotation: Rotation, max_positions: int, device: torch.device | str) -> RopeTable:
    """Return the cosines and sines of a rotary embedding, (max_positions, rotated values / 2) float32 each.

    LongRoPE's table has 2 × max_positions rows: first those for short sequences, then those for long sequences.

    Args:
        rotation: The rotary embedding.
        max_positions: The number of positions.
        device: The device of the table. Its values are equal on all devices.
    """
    if rotation.rope is None:  # a single pair of values is rotated, by 0
        cos = torch.ones(max_positions, 1, device=device)
        return RopeTable(cos, torch.zeros_like(cos))
    frequencies = inverse_frequencies(rotation.rope, rotation.dim)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies[..., None, :]
    angles = angles.flatten(0, -2)
    factor = rotation.rope.attention_factor
    cos, sin = ((part * factor).to(device) for part in (angles.cos(), angles.sin()))
    return RopeTable(cos, sin, rotation.interleaved)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle in radians by which each pair of values is rotated per position, (head_dim / 2,) float32.

    For LongRoPE, the result is (2, head_dim / 2): the angles for short sequences, and those for long sequences.

    Args:
        rope: The variant of RoPE.
        head_dim: The number of rotated values of a head.
    """
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
    # Long waves are divided by the factor, short ones kept, others interpolated
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_positions
    waves = 2 * math.pi / plain
    scaled = torch.where(waves > original / low, plain / rope.factor, plain)
    smooth = (original / waves - low) / (high - low)
    between = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = (waves >= original / high) & (waves <= original / low)
    return torch.where(medium, between, scaled)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    # A ramp from extrapolation (fast) to interpolation (slow) (Peng et al., 2023)
    powers = _position_frequencies(rope.theta, head_dim)
    low, high = _yarn_range(rope, head_dim)
    width = high - low if high != low else 0.001  # no singularity
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_range(rope: RopeConfig, head_dim: int) -> tuple[float, float]:
    low, high = (_yarn_dimension(rotations, rope, head_dim) for rotations in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, head_dim - 1)


def _yarn_dimension(rotations: float, rope: RopeConfig, head_dim: int) -> float:
    # The dimension that rotates `rotations` times over the original context length
    turns = rope.original_max_positions / (rotations * 2 * math.pi)
    return head_dim * math.log(turns) / (2 * math.log(rope.theta))


def position_table(spec: ModelSpec, tables: Tables) -> Tensor | None:
    """Return the learned position embeddings, (positions, hidden); None if the model has none.

    For a model with token types, the result is (types × positions, hidden): for each type, the position embeddings plus
    the embedding of the type.

    Args:
        spec: The model.
        tables: Its weights outside of layers.
    """
    if tables.positions is None or spec.encoder is None:
        return tables.positions
    positions = tables.positions[spec.encoder.first_position :]
    if tables.token_types is None:
        return positions
    return torch.cat([positions + of_type for of_type in tables.token_types[:TYPES]])


def distance_table(learned: Tensor, max_positions: int) -> Tensor:
    """Return the relative position bias of attention scores, (heads, 2 × max_positions) float32.

    Column max_positions + d belongs to a key that is d positions after the query.

    Args:
        learned: (buckets, heads), the learned bias of each bucket of distances.
        max_positions: The maximum length of a sequence.
    """
    distances = torch.arange(-max_positions, max_positions, device=learned.device)
    return learned[distance_buckets(distances)].float().t().contiguous()


def distance_buckets(distances: Tensor) -> Tensor:
    """Return the number of the bucket of each distance between query and key, int64, as in T5 (Raffel et al., 2020).

    All distances in a bucket have the same learned bias. Near distances have a bucket each, and farther distances share
    buckets. Keys after the query have other buckets than keys before it.

    Args:
        distances: The position of the key minus the position of the query, int64.
    """
    side, exact = BUCKETS // 2, BUCKETS // 4
    far = distances.abs()
    wide = torch.log(far.clamp(min=1).float() / exact) / math.log(FARTHEST / exact) * (side - exact)
    shared = (exact + wide.long()).clamp(max=side - 1)
    return torch.where(far < exact, far, shared) + side * (distances > 0)
