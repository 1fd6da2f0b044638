"""Writes how the tokens of a step's rows are sampled, as arrays."""

from __future__ import annotations

from itertools import compress

import numpy as np

from batchinfer.engine.schedule.places import places_of
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_plan import ARGMAX, DrawnRows, Ints, PenalisedRows, SamplingPlan

_NONE = np.empty(0, np.int32)


class SamplingWriter:
    """Writes the sampling plans of one step after the other. What does not change while the same rows are sampled is
    looked at once."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos = eos_token_ids
        self._sequences: list[Sequence] = []
        self._plain = True  # whether all of them take the argmax in every step
        self._fixed_sent = False

    def of(self, sequences: list[Sequence], before: list[Sequence]) -> SamplingPlan:
        """Return the plan for the next tokens of these sequences. `before`: those whose tokens the step before samples,
        in order."""
        if sequences != self._sequences:
            self._plain = all(s.plain_greedy and s.mask is None for s in sequences)
            self._sequences, self._fixed_sent = sequences, False
        return ARGMAX if self._plain else self._plan(sequences, before)

    def _plan(self, sequences: list[Sequence], before: list[Sequence]) -> SamplingPlan:
        shaped = [i for i, s in enumerate(sequences) if s.request.params.penalised or _bans(s)]
        masked = [i for i, s in enumerate(sequences) if s.mask is not None]
        asking = [i for i, s in enumerate(sequences) if s.logprobs is not None]
        greedy = all(s.request.params.greedy for s in sequences)
        return SamplingPlan(
            argmax=greedy and not shaped and not asking,
            masked=masked,
            masks=[mask for s in sequences if (mask := s.mask) is not None],
            followed=[sequences[i].masking.followed for i in masked],
            asking=asking,
            likeliest=[sequences[i].request.params.logprobs or 0 for i in asking],
            among_allowed=[sequences[i].request.params.confidence for i in asking],
            penalised=self._penalised(shaped, sequences, before) if shaped else None,
            drawn=None if greedy else self._drawn(sequences),
        )

    def _drawn(self, sequences: list[Sequence]) -> DrawnRows:
        positions = np.array([s.output_length for s in sequences], np.int32)
        if self._fixed_sent:
            return DrawnRows(positions, None)
        self._fixed_sent = True
        params = [s.request.params for s in sequences]
        keys = np.frombuffer(b"".join(s.request.key[:16] for s in sequences), "<i4").reshape(-1, 4)
        fixed = (
            np.array([p.temperature for p in params], np.float32),
            np.array([max(p.top_k, 0) for p in params], np.int32),
            np.array([p.top_p for p in params], np.float64),
            np.array([p.min_p for p in params], np.float64),
            keys.astype(np.int32),
        )
        return DrawnRows(positions, fixed)

    def _penalised(self, rows: list[int], sequences: list[Sequence], before: list[Sequence]) -> PenalisedRows:
        chosen = [sequences[i] for i in rows]
        params = [s.request.params for s in chosen]
        held = [np.frombuffer(s.tokens, np.int32) if s.request.params.penalised else _NONE for s in chosen]
        lengths = np.array([len(ids) for ids in held], np.int32)
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
        waits = [s.placeholders > 0 and s.request.params.penalised for s in chosen]
        last = np.cumsum(lengths, dtype=np.int32) - np.int32(1)
        return PenalisedRows(
            rows=np.array(rows, np.int32),
            tokens=np.concatenate([*held, _NONE]),
            lengths=lengths,
            prompt_lens=np.minimum([s.prompt_length for s in chosen], lengths).astype(np.int32),
            strengths=np.array([[getattr(p, name) for p in params] for name in names], np.float32),
            banned=self._banned(chosen),
            awaited=last[waits],
            sampled=awaited_from(list(compress(chosen, waits)), before),
        )

    def _banned(self, sequences: list[Sequence]) -> Ints:
        """List the tokens that may not end a row yet: (n, most) int32, padded with -1."""
        banned = [self._bans_of(s) for s in sequences]
        table = np.full((len(banned), max(map(len, banned))), -1, np.int32)
        for row, ids in enumerate(banned):
            table[row, : len(ids)] = ids
        return table

    def _bans_of(self, sequence: Sequence) -> list[int]:
        if not _bans(sequence):
            return []
        params = sequence.request.params
        return sorted(set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos))


def awaited_from(waiting: list[Sequence], before: list[Sequence]) -> Ints:
    """Return the places of these sequences among those whose tokens the step before samples."""
    places = places_of(waiting, before)
    assert -1 not in places, "a token is awaited of a step that did not run the sequence"
    return np.array(places, np.int32)


def _bans(sequence: Sequence) -> bool:
    """Whether it may not end yet. Its constraint alone says when an answer may, where it has one."""
    params = sequence.request.params
    return params.constraint is None and sequence.output_length < params.min_tokens
