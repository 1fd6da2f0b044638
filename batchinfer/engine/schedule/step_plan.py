"""The plan of a step is plain data, from which a runner computes it. No sequence leaves the scheduler's side.

A plan says what is new since the plan before; the runner keeps the rest (`StepState`). So plans are small, and whoever
gets all of them, in order, can do what the runner does: a rank, a simulation, a recorder. Plans pickle by hand: what
`dataclasses` and numpy do of themselves takes several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from batchinfer.engine.schedule.token_edits import AllowedTokens, BiasedTokens

Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
States = NDArray[np.floating[Any]]  # hidden states in float32, or sums of them in float64
Pickled = tuple[Callable[..., Any], tuple[Any, ...]]


class PlanWants(NamedTuple):
    """The parts of plans that a runner reads besides the spans of their chunks."""

    # Tokens, block tables, and how tokens are sampled; a runner that only counts reads none
    inputs: bool = True
    requests: bool = False
    shared_blocks: bool = False
    repeats: bool = False  # whether it runs several steps that only decode for one plan


COMPUTES = PlanWants()  # what a runner wants that computes tokens
COUNTS = PlanWants(inputs=False, requests=True, shared_blocks=True)


class TableChanges(NamedTuple):
    """The entries that were written to the block tables of a cache group since the plan before."""

    spans: Ints  # (m, 3): row, first entry, number of entries. One from entry 0 on begins its row anew
    blocks: Ints  # the entries of all spans, one after the other
    width: int  # the most blocks that a sequence of the step has


class Awaited(NamedTuple):
    """Tokens that only the device knows: those that the step before samples."""

    places: Ints | None  # where they belong among the step's tokens; None: it has no others
    sampled: Ints | None  # which of the sampled tokens they are; None: all, in order


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRows:
    """How the tokens of n rows are drawn; see `batchinfer_kernels.sample.RowSampling`."""

    positions: Ints  # (n,)
    # (n,) float32, (n,) int32, (n,) float64, (n,) float64; keys: (n, 4) int32. None: as in the plan before that had any
    fixed: tuple[NDArray[Any], ...] | None

    def part(self, first: int, end: int) -> DrawnRows:
        """Return the rows [first, end)."""
        assert self.fixed is not None
        return DrawnRows(self.positions[first:end], tuple(values[first:end] for values in self.fixed))

    def __reduce__(self) -> Pickled:
        fixed = None if self.fixed is None else tuple(values.tobytes() for values in self.fixed)
        return _drawn, (self.positions.tobytes(), fixed)


def _drawn(positions: bytes, fixed: tuple[bytes, ...] | None) -> DrawnRows:
    found: tuple[NDArray[Any], ...] | None = None
    if fixed is not None:
        kinds = (np.float32, np.int32, np.float64, np.float64, np.int32)
        *first, keys = (np.frombuffer(data, kind) for data, kind in zip(fixed, kinds, strict=True))
        found = (*first, keys.reshape(-1, 4))
    return DrawnRows(np.frombuffer(positions, np.int32), found)


@dataclass(frozen=True, slots=True, eq=False)
class PenalisedRows:
    """The rows whose logits are changed by their text or may not end yet; see `batchinfer_kernels.penalties`."""

    rows: Ints  # (n,): which of the sampled rows they are
    tokens: Ints  # what they hold so far, one after the other
    lengths: Ints  # (n,): of these
    prompt_lens: Ints  # (n,)
    strengths: NDArray[np.float32]  # (3, n): repetition, presence, frequency
    banned: Ints  # (n, any); negative: none
    awaited: Ints  # which of `tokens` the step before samples
    sampled: Ints  # which of the tokens that it samples these are

    @property
    def starts(self) -> Longs:
        """Return where in `tokens` each row begins, (n,)."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def part(self, first: int, end: int) -> PenalisedRows | None:
        """Return what of these are the sampled rows [first, end), which then begin at 0."""
        inside = np.flatnonzero((self.rows >= first) & (self.rows < end))
        if not len(inside):
            return None
        low, high = inside[0], inside[-1] + 1
        edges = [0, *np.cumsum(self.lengths).tolist()]
        start, stop = edges[low], edges[high]
        awaited = (self.awaited >= start) & (self.awaited < stop)
        return PenalisedRows(
            self.rows[low:high] - np.int32(first),
            self.tokens[start:stop],
            self.lengths[low:high],
            self.prompt_lens[low:high],
            self.strengths[:, low:high],
            self.banned[low:high],
            self.awaited[awaited] - np.int32(start),
            self.sampled[awaited],
        )

    def __reduce__(self) -> Pickled:
        arrays = (
            self.rows,
            self.tokens,
            self.lengths,
            self.prompt_lens,
            self.awaited,
            self.sampled,
            self.banned,
        )
        return _penalised, (*(array.tobytes() for array in arrays), self.strengths.tobytes())


def _penalised(*data: bytes) -> PenalisedRows:
    rows, tokens, lengths, prompts, awaited, sampled, banned = (
        np.frombuffer(one, np.int32) for one in data[:-1]
    )
    strengths = np.frombuffer(data[-1], np.float32).reshape(3, -1)
    return PenalisedRows(
        rows, tokens, lengths, prompts, strengths, banned.reshape(len(rows), -1), awaited, sampled
    )


class ScoredTokens(NamedTuple):
    """Tokens whose log-probabilities are asked for, given what stands before them."""

    rows: Ints  # (n,): the sampled row behind whose token each of them would stand, ascending
    tokens: Ints  # (n,)
    # How many of the likeliest tokens at the place of each have their log-probabilities asked for, too
    likeliest: int = 0

    def part(self, first: int, end: int) -> ScoredTokens | None:
        """Return those of the rows [first, end), if there are any."""
        low, high = np.searchsorted(self.rows, (first, end))
        return (
            None
            if low == high
            else ScoredTokens(self.rows[low:high] - np.int32(first), self.tokens[low:high], self.likeliest)
        )


class TokenScores(NamedTuple):
    """The log-probabilities of scored tokens on the host, in the order of their plan."""

    logprobs: NDArray[np.float32]  # (n,); NaN where logits are not finite
    greedy: NDArray[np.bool_]  # (n,): whether the token is the argmax
    top: NDArray[np.float32]  # (n, likeliest): of the likeliest tokens, in descending order
    top_ids: Longs  # (n, likeliest): which these are

    @classmethod
    def joined(cls, parts: Iterable[Iterable[NDArray[Any]]]) -> TokenScores:
        """Join the scores of micro-batches, the fields of this class each, in their order."""
        each = [tuple(part) for part in parts]
        return cls(*map(np.concatenate, zip(*each, strict=True))) if each else NO_SCORES


NO_SCORES = TokenScores(
    np.empty(0, np.float32), np.empty(0, np.bool_), np.empty((0, 0), np.float32), np.empty((0, 0), np.int64)
)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingPlan:
    """The plan says what the sampled rows ask for and how tokens are chosen. Rows are named by their place here."""

    argmax: bool = True  # nothing but a mask gives any row another token than the argmax of its logits
    masked: list[int] = field(default_factory=list)  # rows that have a mask
    masks: list[int] = field(default_factory=list)  # of each of these, the number of its mask
    # Of each of these, whether its last token would have been the same without the mask
    followed: list[bool] = field(default_factory=list)
    asking: list[int] = field(default_factory=list)  # rows that ask for log-probabilities
    # Of each of these, for how many of the likeliest tokens
    likeliest: list[int] = field(default_factory=list)
    # Of each of these, whether only the tokens count that its mask allows
    among_allowed: list[bool] = field(default_factory=list)
    penalised: PenalisedRows | None = None
    drawn: DrawnRows | None = None  # None: no row's token is drawn
    states: list[int] = field(default_factory=list)  # rows whose hidden states are asked for
    # Of each of these, ascending, which of the chunks that ask for states it is of
    state_chunks: list[int] = field(default_factory=list)
    summed: bool = False  # whether the states of a chunk are added up
    chooses: bool = True  # whether rows get tokens at all
    classified: bool = False  # whether the classification head makes logits of the states, or of their means
    scored: ScoredTokens | None = None  # None: no row is asked how likely tokens are behind it
    biased: BiasedTokens | None = None
    allowed: AllowedTokens | None = None  # None: no row is kept from any token
    # Which of the rows get tokens, ascending: all else but `scored` and `states` names rows by their place among these.
    # None: all
    chosen: Ints | None = None

    def choosing(self, rows: int) -> int:
        """Count those of so many sampled rows that get tokens, where any do."""
        return rows if self.chosen is None else len(self.chosen)

    @property
    def edited(self) -> bool:
        """Whether logits are changed before tokens are chosen."""
        changed = (self.penalised, self.biased, self.allowed)
        return bool(self.masked) or any(part is not None for part in changed)

    def later(self, ahead: Ints) -> SamplingPlan:
        """Return the plan of a later step of the same rows, each of which is so many tokens further on, (n,). What rows
        ask for does not depend on their text."""
        drawn = self.drawn
        return (
            self if drawn is None else replace(self, drawn=replace(drawn, positions=drawn.positions + ahead))
        )

    def part(self, first: int, end: int) -> SamplingPlan:
        """Return the plan of the rows [first, end)."""
        scored = None if self.scored is None else self.scored.part(first, end)
        states = [at for at, row in enumerate(self.states) if first <= row < end]
        stated = [self.states[at] - first for at in states]
        chosen, begin = self.chosen, first
        if chosen is not None:
            first, end = np.searchsorted(chosen, (first, end)).tolist()
            chosen = chosen[first:end] - np.int32(begin)
        masked = [at for at, row in enumerate(self.masked) if first <= row < end]
        asking = [at for at, row in enumerate(self.asking) if first <= row < end]
        return SamplingPlan(
            self.argmax,
            [self.masked[at] - first for at in masked],
            [self.masks[at] for at in masked],
            [self.followed[at] for at in masked],
            [self.asking[at] - first for at in asking],
            [self.likeliest[at] for at in asking],
            [self.among_allowed[at] for at in asking],
            None if self.penalised is None else self.penalised.part(first, end),
            None if self.drawn is None else self.drawn.part(first, end),
            stated,
            [self.state_chunks[at] for at in states],
            self.summed,
            self.chooses and (chosen is None or len(chosen) > 0),
            self.classified,
            scored,
            None if self.biased is None else self.biased.part(first, end),
            None if self.allowed is None else self.allowed.part(first, end),
            chosen,
        )

    def __reduce__(self) -> Pickled:
        """An equal plan for all whose tokens are argmaxes, as nearly always, takes a byte."""
        if self is ARGMAX:
            return _argmax, ()
        lists = (self.masked, self.masks, self.followed, self.asking, self.likeliest, self.among_allowed)
        asked = (self.argmax, *lists, self.penalised, self.drawn)
        asked_for, chosen = self.scored, None if self.chosen is None else self.chosen.tobytes()
        scored = (
            None if asked_for is None else (*(one.tobytes() for one in asked_for[:2]), asked_for.likeliest)
        )
        how, edits = (self.chooses, self.classified, chosen), (self.biased, self.allowed)
        states = (self.states, self.state_chunks, self.summed)
        return _sampling, (asked, states, how, scored, *edits)


ARGMAX = SamplingPlan()


def _argmax() -> SamplingPlan:
    return ARGMAX


def _sampling(
    asked: tuple[Any, ...], states: tuple[list[int], list[int], bool],
    how: tuple[bool, bool, bytes | None], scored: tuple[bytes, bytes, int] | None, *edits: Any,
) -> SamplingPlan:  # fmt: skip
    tokens = None
    if scored is not None:
        places, ids, likeliest = scored
        tokens = ScoredTokens(np.frombuffer(places, np.int32), np.frombuffer(ids, np.int32), likeliest)
    *said, chosen = how
    fields: tuple[Any, ...] = (*asked, *states, *said, tokens, *edits, _ints(chosen))
    return SamplingPlan(*fields)


class AskedRows(NamedTuple):
    """The part of a plan that asks for tokens, hidden states or log-probabilities; see StepPlan."""

    sampled: Ints | None
    counts: list[int] | None
    sampling: SamplingPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step: chunks of S sequences, T tokens, one chunk after the other."""

    starts: Ints  # (S,): the position of each chunk's first token
    lengths: Ints | None  # (S,): tokens of each chunk; None: 1 of each
    # (S,): where each sequence's block table lies; None: the same sequences run as in the plan before, in this order
    rows: Ints | None
    # (S,): where their positions begin in the rotary tables; None, where `rows` are given: 0
    rope_offsets: Ints | None
    # (S,): from which position on their tokens have the type 1, 0 for none; None, where `rows` are given: all 0
    second_segments: Ints | None
    # (S,): the fingerprints of their adapters, "" for none; None, where `rows` are given: no sequence has one
    adapters: tuple[str, ...] | None
    tokens: Ints  # (T,)
    tables: tuple[TableChanges, ...]  # of each cache group
    # (n, 6): chunk, cache group, source, target, first slot, end; in each layer, before attention
    copies: Ints | None
    sampled: Ints | None  # which of the T tokens are followed by a sampled one, ascending; None: all
    # How many of the sampled ones belong to each chunk that has any; None: one to each
    sampled_counts: list[int] | None
    awaited: Awaited | None
    sampling: SamplingPlan
    # Where `PlanWants` asks: of each chunk, the key of its request and how many tokens its answer has
    requests: list[tuple[bytes, int]] | None = None
    # (T,): of each node of a tree of drafts the bits of its ancestors and its own, see TreeMask; of other tokens 0. The
    # nodes end their chunk. None: there is no tree
    tree_bits: Ints | None = None
    shared_blocks: int = 0  # where it asks: how often a table names a block that another one named before
    # (S,), where it asks: how many tokens each sequence decodes, one in each of as many steps, of which this is the
    # first. Block tables have room for all of them. None: one each
    repeats: Ints | None = None

    @property
    def steps(self) -> int:
        """Return how many steps are run for the plan."""
        return 1 if self.repeats is None else int(self.repeats.max())

    @property
    def chunk_lengths(self) -> Ints:
        """Return the tokens of each chunk, (S,)."""
        return np.ones(len(self.starts), np.int32) if self.lengths is None else self.lengths

    @property
    def sampled_rows(self) -> int:
        """Count the rows that are sampled."""
        return len(self.tokens) if self.sampled is None else len(self.sampled)

    def __reduce__(self) -> Pickled:
        arrays = (
            self.starts,
            self.lengths,
            self.rows,
            self.rope_offsets,
            self.second_segments,
            self.tokens,
            self.copies,
            self.sampled,
            self.tree_bits,
            self.repeats,
        )
        sent = [None if array is None else array.tobytes() for array in arrays]
        tables = [(spans.tobytes(), blocks.tobytes(), width) for spans, blocks, width in self.tables]
        awaited = self.awaited
        waits = awaited and tuple(None if array is None else array.tobytes() for array in awaited)
        rest = (self.sampled_counts, self.sampling, self.requests, self.shared_blocks)
        return _step_plan, (sent, self.adapters, tables, waits, *rest)


def _step_plan(
    sent: list[bytes | None],
    adapters: tuple[str, ...] | None,
    tables: list[tuple[bytes, bytes, int]],
    waits: tuple[bytes | None, ...] | None,
    counts: list[int] | None,
    sampling: SamplingPlan,
    requests: list[tuple[bytes, int]] | None,
    shared_blocks: int,
) -> StepPlan:
    starts, lengths, rows, offsets, segments, tokens, copies, sampled, bits, repeats = map(_ints, sent)
    assert starts is not None
    assert tokens is not None
    changes = tuple(
        TableChanges(np.frombuffer(spans, np.int32).reshape(-1, 3), np.frombuffer(blocks, np.int32), width)
        for spans, blocks, width in tables
    )
    copied = None if copies is None else copies.reshape(-1, 6)
    awaited = None if waits is None else Awaited(*map(_ints, waits))
    return StepPlan(
        starts, lengths, rows, offsets, segments, adapters, tokens, changes, copied, sampled, counts, awaited,
        sampling, requests, bits, shared_blocks, repeats,
    )  # fmt: skip


def _ints(data: bytes | None) -> Ints | None:
    return None if data is None else np.frombuffer(data, np.int32)


class RankStep(NamedTuple):
    """A step of one of the engines that take turns on the ranks."""

    turn: int
    plan: StepPlan
