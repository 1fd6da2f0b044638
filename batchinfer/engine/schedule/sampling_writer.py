"""Writes the sampling parameters of a step's rows as arrays."""

from __future__ import annotations

from itertools import compress, repeat

import numpy as np

from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.schedule.draft_tree import node_path
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_plan import ARGMAX, DrawnRows, Ints, PenalisedRows, SamplingPlan
from batchinfer.engine.schedule.token_edits import AllowedTokens, BiasedTokens

_NONE = np.empty(0, np.int32)


def indices_of(wanted: list[Sequence], among: list[Sequence]) -> list[int]:
    """Return the index of each sequence of `wanted` in the list `among`, or -1 if the list does not contain it."""
    indices = dict(zip(among, range(len(among)), strict=True))
    # Without a Python loop: rows end in nearly every step of a full batch
    return list(map(indices.get, wanted, repeat(-1)))


class SamplingWriter:
    """Creates the sampling plan of each step: which rows get tokens, and with which parameters.

    Parameters that do not change from step to step are computed again only when the sequences of the step change.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos = eos_token_ids
        self._sequences: list[Sequence] = []
        self._plain = True  # True if all sequences take the argmax in every step
        self._fixed_sent = False
        self._banning: list[int] = []  # indices of sequences with banned tokens
        self._biased: BiasedTokens | None = None
        self._allowed: AllowedTokens | None = None

    def of(
        self, sequences: list[Sequence], before: list[Sequence], ahead: list[int] | None = None
    ) -> SamplingPlan:
        """Return the sampling plan of a step.

        A sampled row is a token of the step after which a token is sampled: the last known token of a sequence, or one
        of its drafts.

        Args:
            sequences: The sequence of each sampled row.
            before: The sequence of each sampled row of the previous step.
            ahead: For each row, the number of the sequence's drafts up to the row; 0 for the last known token. None:
                the step has no drafts.
        """
        if sequences != self._sequences:
            self._plain = all(s.plain_greedy and s.mask is None for s in sequences)
            self._sequences, self._fixed_sent = sequences, False
            self._biased, self._allowed = _biased(sequences), _allowed(sequences)
            self._banning = [i for i, s in enumerate(sequences) if s.bad or s.request.params.min_tokens]
        return ARGMAX if self._plain else self._plan(_Rows(sequences, ahead), before)

    def _plan(self, rows: _Rows, before: list[Sequence]) -> SamplingPlan:
        sequences, answered = rows.sequences, rows.answered
        banned = {i: banned_tokens(sequences[i], self._eos, rows.text(i), answered[i]) for i in self._banning}
        shaped = [i for i, s in enumerate(sequences) if s.request.params.has_penalty or banned.get(i)]
        masked = [i for i, s in enumerate(sequences) if s.mask is not None]
        asking = [i for i, s in enumerate(sequences) if s.logprobs is not None]
        greedy = all(s.request.params.greedy for s in sequences)
        return SamplingPlan(
            argmax=greedy and not shaped and not asking and self._biased is None and self._allowed is None,
            masked=masked,
            masks=rows.masks(masked),
            followed=[sequences[i].masking.followed for i in masked],
            asking=asking,
            likeliest=[sequences[i].request.params.logprobs or 0 for i in asking],
            among_allowed=[sequences[i].request.params.confidence for i in asking],
            penalised=_penalised(shaped, rows, banned, before) if shaped else None,
            drawn=None if greedy else self._drawn(sequences, answered),
            biased=self._biased,
            allowed=self._allowed,
        )

    def _drawn(self, sequences: list[Sequence], answered: list[int]) -> DrawnRows:
        positions = np.array(answered, np.int32)
        if self._fixed_sent:
            return DrawnRows(positions, None)
        self._fixed_sent = True
        params = [s.request.params for s in sequences]
        keys = np.frombuffer(b"".join(s.request.draw_key for s in sequences), "<i4").reshape(-1, 4)
        fixed = (
            np.array([p.temperature for p in params], np.float32),
            np.array([max(p.top_k, 0) for p in params], np.int32),
            np.array([p.top_p for p in params], np.float64),
            np.array([p.min_p for p in params], np.float64),
            keys.astype(np.int32),
        )
        return DrawnRows(positions, fixed)


class _Rows:
    def __init__(self, sequences: list[Sequence], ahead: list[int] | None) -> None:
        self.sequences = sequences
        self._ahead = ahead
        # The length of the answer before each row's token, accepted drafts included
        self.answered = [s.output_length for s in sequences]
        if ahead is not None:
            each = zip(sequences, ahead, strict=True)
            self.answered = [s.output_length - s.drafts + _depth(s, n) for s, n in each]

    def masks(self, masked: list[int]) -> list[int]:
        found: list[int] = []
        for i in masked:
            sequence, ahead = self.sequences[i], 0 if self._ahead is None else self._ahead[i]
            mask = sequence.draft_masks[ahead - 1] if ahead else sequence.mask
            assert mask is not None, "a row without a mask counts as masked"
            found.append(mask)
        return found

    def text(self, i: int) -> Ints:
        sequence, ahead = self.sequences[i], 0 if self._ahead is None else self._ahead[i]
        tokens = np.frombuffer(sequence.tokens, np.int32)
        if not ahead or not sequence.draft_parents:
            return tokens[: sequence.prompt_length + self.answered[i]]
        confirmed = len(sequence) - sequence.drafts
        path = [confirmed + node for node in node_path(sequence.draft_parents, ahead - 1)]
        return np.concatenate((tokens[:confirmed], tokens[path]))


def _depth(sequence: Sequence, ahead: int) -> int:
    parents = sequence.draft_parents
    return len(node_path(parents, ahead - 1)) if parents else ahead


def _penalised(
    shaped: list[int], rows: _Rows, banned: dict[int, list[int]], before: list[Sequence]
) -> PenalisedRows:
    chosen = [rows.sequences[i] for i in shaped]
    params = [s.request.params for s in chosen]
    held = [rows.text(i) if rows.sequences[i].request.params.has_penalty else _NONE for i in shaped]
    lengths = np.array([len(ids) for ids in held], np.int32)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    waits = [s.placeholders > 0 and s.request.params.has_penalty for s in chosen]
    last = np.cumsum(lengths, dtype=np.int32) - np.int32(1)
    return PenalisedRows(
        rows=np.array(shaped, np.int32),
        tokens=np.concatenate([*held, _NONE]),
        lengths=lengths,
        prompt_lens=np.minimum([s.prompt_length for s in chosen], lengths).astype(np.int32),
        strengths=np.array([[getattr(p, name) for p in params] for name in names], np.float32),
        banned=_table([banned.get(i, []) for i in shaped]),
        awaited=last[waits],
        sampled=awaited_from(list(compress(chosen, waits)), before),
    )


def _table(banned: list[list[int]]) -> Ints:
    table = np.full((len(banned), max(map(len, banned))), -1, np.int32)
    for row, ids in enumerate(banned):
        table[row, : len(ids)] = ids
    return table


def awaited_from(waiting: list[Sequence], before: list[Sequence]) -> Ints:
    """Return where the previous step samples the last token of each sequence: an index among its sampled rows.

    Args:
        waiting: The sequences whose last token is sampled by the previous step.
        before: The sequence of each sampled row of the previous step.
    """
    places = indices_of(waiting, before)
    assert -1 not in places, "a sequence awaits a token of a step that did not run it"
    return np.array(places, np.int32)


def _biased(sequences: list[Sequence]) -> BiasedTokens | None:
    pairs = [(i, bias) for i, s in enumerate(sequences) if (bias := s.request.params.logit_bias)]
    return BiasedTokens.of(pairs) if pairs else None


def _allowed(sequences: list[Sequence]) -> AllowedTokens | None:
    pairs = [(i, ids) for i, s in enumerate(sequences) if (ids := s.request.params.allowed_token_ids)]
    return AllowedTokens.of(pairs) if pairs else None


def banned_tokens(sequence: Sequence, eos: frozenset[int], text: Ints, answered: int) -> list[int]:
    """Return the tokens that a sequence must not get next, because of bad words or min_tokens, in ascending order.

    Args:
        sequence: The sequence.
        eos: The end-of-sequence tokens of the model.
        text: The token ids of the prompt and of the answer so far.
        answered: The number of answer tokens in `text`.
    """
    params, bad, start = sequence.request.params, sequence.bad, sequence.prompt_length
    banned = [] if bad is None else bad.banned_after(text, start, start + answered)
    if is_end_banned(params, answered):
        banned += [*params.stop_token_ids, *(() if params.ignore_eos else eos)]
    return sorted(set(banned)) if banned else banned


def is_end_banned(params: SamplingParams, answered: int) -> bool:
    """Return True if an answer must not end yet because it has fewer tokens than min_tokens.

    With a constraint, the result is always False, because the constraint decides when the answer may end.

    Args:
        params: The sampling parameters of the answer.
        answered: The number of answer tokens so far.
    """
    return params.constraint is None and answered < params.min_tokens
