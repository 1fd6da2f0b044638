"""Sequences that may not get every token: whether one is left."""

from __future__ import annotations

import numpy as np

from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.engine.schedule.sampling_writer import bans_of
from batchinfer.engine.schedule.sequence import Sequence

_WORDS = 1 << 14  # of a mask: 524,288 tokens, more than models have


def leaves_none(sequence: Sequence, eos: frozenset[int], masks: ConstraintMasks | None) -> bool:
    """Whether there is no token that a sequence may get next. `eos`: of the model; `masks`: those of constraints."""
    allowed: set[int] | None = set(sequence.request.params.allowed_token_ids) or None
    if sequence.mask is not None and masks is not None:
        followed = _unmasked(sequence.mask, masks)
        allowed = followed if allowed is None else allowed & followed
    said = sequence.known_length - sequence.prompt_length
    if allowed is None:
        return False
    return not allowed.difference(bans_of(sequence, eos, np.frombuffer(sequence.tokens, np.int32), said))


def _unmasked(mask: int, masks: ConstraintMasks) -> set[int]:
    bits = np.full((1, _WORDS), -1, np.int32)
    masks.fill([mask], bits)
    found: list[int] = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    return set(found)
