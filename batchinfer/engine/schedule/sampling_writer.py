"""Writes how the tokens of a step's rows are sampled, as arrays."""

from __future__ import annotations

from itertools import compress

import numpy as np

from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.schedule.places import places_of
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_plan import ARGMAX, DrawnRows, Ints, PenalisedRows, SamplingPlan
from batchinfer.engine.schedule.token_edits import AllowedTokens, BiasedTokens

_NONE = np.empty(0, np.int32)


class SamplingWriter:
    """Writes the sampling plans of one step after the other. What does not change while the same rows are sampled is
    looked at once."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos = eos_token_ids
        self._sequences: list[Sequence] = []
        self._plain = True  # whether all of them take the argmax in every step
        self._fixed_sent = False
        self._banning: list[int] = []  # those that may have tokens that they may not get
        self._biased: BiasedTokens | None = None  # of these sequences
        self._allowed: AllowedTokens | None = None

    def of(self, sequences: list[Sequence], before: list[Sequence]) -> SamplingPlan:
        """Return the plan for the next tokens of these sequences. `before`: those whose tokens the step before samples,
        in order."""
        if sequences != self._sequences:
            self._plain = all(s.plain_greedy and s.mask is None for s in sequences)
            self._sequences, self._fixed_sent = sequences, False
            self._biased, self._allowed = _biased(sequences), _allowed(sequences)
            self._banning = [i for i, s in enumerate(sequences) if s.bad or s.request.params.min_tokens]
        return ARGMAX if self._plain else self._plan(sequences, before)

    def _plan(self, sequences: list[Sequence], before: list[Sequence]) -> SamplingPlan:
        banned = {i: bans_of(sequences[i], self._eos, sequences[i].output_length) for i in self._banning}
        shaped = [i for i, s in enumerate(sequences) if s.request.params.penalised or banned.get(i)]
        masked = [i for i, s in enumerate(sequences) if s.mask is not None]
        asking = [i for i, s in enumerate(sequences) if s.logprobs is not None]
        greedy = all(s.request.params.greedy for s in sequences)
        return SamplingPlan(
            argmax=greedy and not shaped and not asking and self._biased is None and self._allowed is None,
            masked=masked,
            masks=[mask for s in sequences if (mask := s.mask) is not None],
            followed=[sequences[i].masking.followed for i in masked],
            asking=asking,
            likeliest=[sequences[i].request.params.logprobs or 0 for i in asking],
            among_allowed=[sequences[i].request.params.confidence for i in asking],
            penalised=_penalised(shaped, sequences, banned, before) if shaped else None,
            drawn=None if greedy else self._drawn(sequences),
            biased=self._biased,
            allowed=self._allowed,
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


def _penalised(
    rows: list[int], sequences: list[Sequence], banned: dict[int, list[int]], before: list[Sequence]
) -> PenalisedRows:
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
        banned=_table([banned.get(i, []) for i in rows]),
        awaited=last[waits],
        sampled=awaited_from(list(compress(chosen, waits)), before),
    )


def _table(banned: list[list[int]]) -> Ints:
    """Lay the tokens that rows may not get out as a table: (n, most) int32, padded with -1."""
    table = np.full((len(banned), max(map(len, banned))), -1, np.int32)
    for row, ids in enumerate(banned):
        table[row, : len(ids)] = ids
    return table


def awaited_from(waiting: list[Sequence], before: list[Sequence]) -> Ints:
    """Return the places of these sequences among those whose tokens the step before samples."""
    places = places_of(waiting, before)
    assert -1 not in places, "a token is awaited of a step that did not run the sequence"
    return np.array(places, np.int32)


def _biased(sequences: list[Sequence]) -> BiasedTokens | None:
    asked = [(i, bias) for i, s in enumerate(sequences) if (bias := s.request.params.logit_bias)]
    return BiasedTokens.of(asked) if asked else None


def _allowed(sequences: list[Sequence]) -> AllowedTokens | None:
    asked = [(i, ids) for i, s in enumerate(sequences) if (ids := s.request.params.allowed_token_ids)]
    return AllowedTokens.of(asked) if asked else None


def bans_of(sequence: Sequence, eos: frozenset[int], said: int) -> list[int]:
    """Return the tokens that a sequence may not get behind `said` tokens of its answer. `eos`: those of the model."""
    params, bad, start = sequence.request.params, sequence.bad, sequence.prompt_length
    banned = [] if bad is None else bad.behind(sequence.tokens, start, start + said)
    if may_not_end(params, said):
        banned += [*params.stop_token_ids, *(() if params.ignore_eos else eos)]
    return sorted(set(banned)) if banned else banned


def may_not_end(params: SamplingParams, said: int) -> bool:
    """Whether an answer may not end yet. Its constraint alone says when it may, where it has one."""
    return params.constraint is None and said < params.min_tokens
