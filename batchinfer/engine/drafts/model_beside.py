"""A smaller model beside the job's proposes what follows rows. Its K and V lie in the blocks that rows hold anyway."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from math import log2
from typing import NamedTuple, cast

import numpy as np

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import TokenLogprobs
from batchinfer.core.samples import DraftName
from batchinfer.engine.drafts.acceptance import NodeAcceptance
from batchinfer.engine.drafts.proposal_times import ProposalTimes
from batchinfer.engine.drafts.worth import expected_right
from batchinfer.engine.loop.drafting import takes
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.runner.runner import Runner
from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.engine.schedule.draft_tree import DraftTree, without_chain
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, Step
from batchinfer.engine.schedule.sequence import CollectedLogprobs, Sequence, SequenceStatus
from batchinfer_kernels.cost import Peaks

MOST_PROPOSED = 16  # tokens of a row at a time
MOST_ROWS = 256  # that it is asked about at a time
LEAVES = 3  # tokens that are proposed beside each one of a chain, the likeliest others
_BELIEVED = 0.75  # how likely a token of a chain is to be right, before any was verified


def spare_blocks(block_size: int, max_num_seqs: int) -> int:
    """Count the blocks of its cache behind those that rows hold: proposals reach beyond the blocks of their rows."""
    return min(MOST_ROWS, max_num_seqs) * -(-MOST_PROPOSED // block_size)


@dataclass(frozen=True, slots=True, eq=False)
class BesideRunner:
    """A draft model that is ready to run, and what it has to know of the job's model."""

    runner: Runner  # with a cache of `blocks` and behind them `spare_blocks`
    roots: ContentRoots  # of its own requests, with the positions that it has
    vocab: int
    blocks: int
    max_num_seqs: int
    most_tokens: int  # that it runs at once
    table: int  # the cache group of the job's model whose tables its own blocks are named by
    whole_vocab: int  # of the job's model
    eos_token_ids: frozenset[int]  # of the job's model
    masks: ConstraintMasks | None  # None: there are none, or they are for other tokens
    # Whether it is a head of the job's model: at each position it reads the token behind it, beside a state that the
    # job's model left there. What it made of its own proposals in place of such states is made again
    head: bool = False
    branches: bool = False  # whether what is proposed of a row may be a tree


class _Given(NamedTuple):
    """The token that the model gave, how likely it was, and the likeliest others, where a tree may be made of them."""

    token: int
    chance: float = 0.0
    others: Seq[tuple[int, float]] = ()


@dataclass(slots=True, eq=False)
class _ReadRow:
    """Remembers what the model has read of a row. `own` is the row as the model runs it, its proposals included; of a
    head's the row's first token is left out."""

    row: Sequence
    own: Sequence
    preemptions: int  # of the row, when its blocks were looked at
    known: int = 0  # tokens of its own that were no proposals
    room: int = 0  # positions in blocks that the row keeps
    mask: int | None = None  # of its constraint, while the model proposes


class ModelBeside:
    """Proposes by a smaller model, which reads what it lacks of a row when it is asked about it, and nothing before: it
    costs nothing where nothing is drafted.

    The block that holds a position of a row in the job's model holds it in this one's cache, too. So what is shared,
    preempted or taken back there is so here: a row's blocks hold what the model read as long as the row holds them, and
    a prompt's full block is known by its digest to whichever row gets it. Behind a row's blocks proposals lie in spare
    ones, from which they are run again if they turn out to be right.

    It draws as the job's model will: with penalties, biases, bans and the draws of the token's position. Where a row
    has a constraint, it proposes what that allows, if both models have as many tokens.

    With `branches` what it proposes is a tree: a chain of the tokens that it runs, each beside the next likeliest ones,
    which nothing follows. How likely they are it says itself, corrected by how many such ones were right.

    A head of the job's model is one, too. What it made at the last position of a block depends on the token behind,
    which rows that part there do not share: they have what the first one of them had, which is worth a little less.
    """

    def __init__(
        self, beside: BesideRunner, peaks: Peaks, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._beside, self._clock = beside, clock
        self._size = beside.runner.layout.block_size
        self._times = ProposalTimes(beside.runner.cost, peaks)
        self._writer = PlanWriter(beside.eos_token_ids, beside.runner.wants)
        self._ahead = int(beside.head)  # by how many tokens those that it reads are before their positions
        self._readings: dict[Sequence, _ReadRow] = {}
        self._contents: dict[int, bytes] = {}  # full blocks of prompts that it has read, by what they hold
        self._acceptance = NodeAcceptance()

    @property
    def name(self) -> DraftName:
        """The name by which reports know it."""
        return "heads" if self._beside.head else "model"

    @property
    def most_rows(self) -> int:
        """The most rows that it is asked about at once."""
        return min(MOST_ROWS, self._beside.max_num_seqs)

    @property
    def most_proposed(self) -> int:
        """The most tokens that it proposes of a row at a time."""
        return MOST_PROPOSED

    def takes(self, row: Sequence) -> bool:
        """Whether it can be asked about a row: it has the row's positions and tokens."""
        beside, length = self._beside, len(row)
        if min(length + MOST_PROPOSED, row.max_length) > beside.roots.max_model_len or length <= self._ahead:
            return False
        return beside.vocab >= beside.whole_vocab or (
            max(row.tokens) < beside.vocab and _most_named(row) < beside.vocab
        )

    def seconds(self, rows: Seq[Sequence], count: int) -> float:
        """Return about how long it takes to propose `count` tokens of each of these rows. What it has to read of a row
        first counts by the share that these tokens are of those that the row may still get."""
        more = sum(self._unread(row) * min(1.0, (count + 1) / (row.max_length - len(row))) for row in rows)
        each, context = len(rows), sum(map(len, rows)) / len(rows)
        first = self._times.seconds(each + more, each, context)
        return first + (count - 1) * self._times.seconds(each, each, context)

    def expected(self, rate: float, count: int) -> float:
        """Return how many tokens of a chain of `count` are expected to be right. With branches it counts itself how
        many of such tokens were; what grows beside them comes on top."""
        return expected_right(
            self._acceptance.rate("chain", _BELIEVED) if self._beside.branches else rate, count
        )

    def verified(self, tree: DraftTree, taken: AcceptedTokens) -> None:
        """Count how many tokens of trees were right, of those that it believed to be about as likely."""
        self._acceptance.verified(tree, taken)
        chain = ["other" if rank else "chain" for _, rank, _ in cast(Seq[_Kind], tree.kinds)]
        self._acceptance.verified(tree._replace(kinds=chain), taken)

    def fade(self, share: float) -> None:
        """Forget a share of what was counted."""
        self._acceptance.fade(share)

    def propose(self, rows: Seq[Sequence], count: int) -> list[DraftTree]:
        """Return up to `count` tokens that may follow each of these rows, which `takes`: `most_rows` or fewer."""
        readings = [self._reading(row, place) for place, row in enumerate(rows)]
        found: dict[Sequence, list[_Given]] = {one.own: [] for one in readings}
        try:
            given, asking = self._read(readings), readings
            for at in range(count):
                for one in asking:
                    found[one.own].append(given[one.own])
                asking = [one for one in asking if self._goes_on(one, given[one.own].token)]
                if not asking or at + 1 == count:
                    break
                given = self._run([Chunk(one.own, one.own.computed, 1) for one in asking])
        finally:
            for one in readings:
                self._forget_mask(one)
        for one in readings:
            self._note(one, one.known - 1, one.own.computed)
        return [self._proposed(one, found[one.own]) for one in readings]

    def _proposed(self, one: _ReadRow, given: Seq[_Given]) -> DraftTree:
        """Return the chain that was run for a row, or a tree about it, whose nodes are the likeliest ones, in order."""
        chain = one.own.tokens[one.known :]
        if not self._beside.branches:
            return DraftTree(chain.tolist())
        drawn, nodes, before, last = not one.row.request.params.greedy, list[_Node](), 1.0, -1
        for step in given:
            candidates = self._candidates(step, drawn)
            nodes += [
                _Node(before * rate, last, token, kind)
                for token, rate, kind in candidates
                if kind[1] or last + 1 < len(chain)
            ]
            last, before = last + 1, before * candidates[0][1]
        return _tree(nodes, len(given))

    def ended(self, row: Sequence) -> None:
        """Forget a row."""
        self._readings.pop(row, None)

    def _unread(self, row: Sequence) -> int:
        """Count the tokens of a row that it has to read beyond the last one."""
        one = self._readings.get(row)
        held = self._found(row) if one is None or one.preemptions != row.preemptions else self._held(one, row)
        return max(0, len(row) - self._ahead - 1 - held)

    def _reading(self, row: Sequence, place: int) -> _ReadRow:
        """Bring up to date what is known of a row, as if all of it were read: it is, before any row behind it."""
        one = self._readings.get(row)
        if one is None or one.preemptions != row.preemptions:
            one = self._readings[row] = _ReadRow(row, self._copied(row), row.preemptions)
            held = self._found(row)
        else:
            held = self._held(one, row)
        table, spare = row.tables[self._beside.table], -(-MOST_PROPOSED // self._size)
        first = self._beside.blocks + place * spare
        own = one.own
        own.tokens, own.tables = row.tokens[self._ahead :], [[*table, *range(first, first + spare)]]
        own.computed = min(held, len(own) - 1)
        # Blocks behind what the job's model has computed may be taken back
        one.known, one.room = len(own), -(-(len(row) - 1) // self._size) * self._size
        self._take_mask(one, row)
        self._note(one, own.computed, one.known)
        return one

    def _copied(self, row: Sequence) -> Sequence:
        roots, params, branches = self._beside.roots, row.request.params, self._beside.branches
        asks = replace(params, logprobs=LEAVES + 1, confidence=False) if branches else params
        return replace(
            row,
            request=replace(row.request, params=asks),
            plain_greedy=row.plain_greedy and not branches,
            prompt_length=row.prompt_length - self._ahead,
            max_length=row.max_length - self._ahead,
            tokens=row.tokens[self._ahead :],
            logprobs=CollectedLogprobs() if branches else None,
            prompt_scores=None,
            constraint=None,
            mask=None,
            rope_offset=roots.rope_offset(row.prompt_length, params),
            status=SequenceStatus.RUNNING,
            freed=[0],
            draft_masks=[],
        )

    def _take_mask(self, one: _ReadRow, row: Sequence) -> None:
        own, masks = one.own, self._beside.masks
        own.constraint = own.mask = None
        if masks is not None and row.constraint is not None and row.mask is not None:
            own.constraint = row.constraint.fork()
            own.mask = one.mask = masks.put(own.constraint)

    def _candidates(self, step: _Given, drawn: bool) -> list[tuple[int, float, _Kind]]:
        """Return the tokens that may stand at a place, how likely each is to be right if what is before it is, and its
        kind. Before any was verified, the others share what the chain's token leaves as the model has it."""
        kind = drawn, 0, _level(step.chance)
        found, left = [(step.token, self._acceptance.rate(kind, _BELIEVED), kind)], max(1e-6, 1 - step.chance)
        for rank, (token, chance) in enumerate(step.others, 1):
            kind, believed = (drawn, rank, _level(chance)), (1 - found[0][1]) * min(1.0, chance / left)
            found.append((token, self._acceptance.rate(kind, believed), kind))
        return found

    def _forget_mask(self, one: _ReadRow) -> None:
        if one.mask is not None and self._beside.masks is not None:
            self._beside.masks.drop(one.mask)
            one.mask = one.own.mask = None

    def _held(self, one: _ReadRow, row: Sequence) -> int:
        """Count the first positions of a row that lie in its blocks as it has them now: of the proposals those that the
        row got."""
        own, same = one.own, one.known
        most = min(one.room, own.computed, len(row))
        if self._ahead:
            return min(same, most)
        while same < most and own.tokens[same] == row.tokens[same]:
            same += 1
        return min(same, most)

    def _found(self, row: Sequence) -> int:
        """Count the positions of a row's prompt that lie in full blocks which were read for another row, or for it."""
        table, size = row.tables[self._beside.table], self._size
        full = row.prompt_blocks(len(row), size)
        known = (at for at in range(full) if self._contents.get(table[at]) != row.block_hash(at, size))
        return next(known, full) * size

    def _note(self, one: _ReadRow, start: int, end: int) -> None:
        """Record what the blocks hold whose positions from `start` to `end` are written.

        The last proposed token is never written: nothing is proposed after it, and it may have no block.
        """
        row, size = one.row, self._size
        table, full = one.own.tables[0], row.prompt_blocks(one.known, size)
        for at in range(start // size, -(-end // size)):
            if at < full:
                self._contents[table[at]] = row.block_hash(at, size)
            else:
                self._contents.pop(table[at], None)

    def _read(self, readings: Seq[_ReadRow]) -> dict[Sequence, _Given]:
        """Read what is not read yet of these rows, one row behind the other; the token that follows each."""
        given: dict[Sequence, _Given] = {}
        chunks, room = list[Chunk](), self._beside.most_tokens
        for one in readings:
            own = one.own
            start, end = own.computed, len(own.tokens)
            while start < end:
                length = min(room, end - start)
                chunks.append(Chunk(own, start, length))
                start, room = start + length, room - length
                if not room:
                    given |= self._run(chunks)
                    chunks, room = [], self._beside.most_tokens
        return given | self._run(chunks) if chunks else given

    def _run(self, chunks: list[Chunk]) -> dict[Sequence, _Given]:
        """Run a step; the tokens that follow those of its chunks that reach the ends of their rows."""
        began, sampling = self._clock(), [c.sequence for c in chunks if c.samples]
        plan = self._writer.of(Step(chunks=chunks), sampling)
        launched = self._beside.runner.launch(plan)
        tokens, logprobs = launched.tokens(), launched.logprobs()
        for sequence, start, length in chunks:
            sequence.computed = start + length
        context = sum(c.end for c in chunks) / len(chunks)
        self._times.measured(sum(c.length for c in chunks), len(chunks), context, self._clock() - began)
        return {
            sequence: _given(own[0], logprobs.get(place))
            for place, (sequence, own) in enumerate(zip(sampling, tokens, strict=True))
        }

    def _goes_on(self, one: _ReadRow, token: int) -> bool:
        """Take a token that the model gave; whether a further one may follow."""
        own, constraint = one.own, one.own.constraint
        if not 0 <= token < self._beside.whole_vocab or token in own.stop_token_ids:
            return False
        if constraint is not None and not takes(constraint, token):
            return False
        own.tokens.append(token)
        forced = constraint is not None and constraint.jump_forward()
        return not forced and len(own.tokens) < min(own.max_length, self._beside.roots.max_model_len)


_Kind = tuple[bool, int, int]  # whether the row draws, the place among the likeliest, and how likely about


class _Node(NamedTuple):
    """A token that may stand in a tree."""

    chance: float  # that it is right, and those before it
    parent: int  # a token of the chain, -1: the row's last one
    token: int
    kind: _Kind

    @property
    def rank(self) -> int:
        """Return its place among the likeliest ones; 0: it is the chain's."""
        return self.kind[1]


def _tree(nodes: Seq[_Node], most: int) -> DraftTree:
    """Make the tree of the likeliest nodes, as many as a chain would have. A parent comes before what is behind it,
    which is less likely."""
    chosen = sorted(nodes, key=lambda node: (-node.chance, node.parent, node.rank))[:most]
    places = {-1: -1} | {node.parent + 1: place for place, node in enumerate(chosen) if not node.rank}
    tokens, chances, kinds = ([getattr(n, name) for n in chosen] for name in ("token", "chance", "kind"))
    return DraftTree(tokens, without_chain([places[node.parent] for node in chosen]), chances, kinds)


def _given(token: int, logprobs: TokenLogprobs | None) -> _Given:
    """Put a token together with the likeliest others, of those that are numbers."""
    if logprobs is None or not np.isfinite(logprobs.chosen[0]):
        return _Given(token)
    each = zip(logprobs.top_ids[0].tolist(), np.exp(logprobs.top[0]).tolist(), strict=True)
    others = [(other, chance) for other, chance in each if other != token and chance > 0]
    return _Given(token, float(np.exp(logprobs.chosen[0])), others[:LEAVES])


def _level(chance: float) -> int:
    """Return the kind of chances that one is of: about so many halvings below 1, in steps of a half."""
    return min(16, round(-2 * log2(max(chance, 1e-9))))


def _most_named(row: Sequence) -> int:
    """Return the largest token that a row's parameters name."""
    params = row.request.params
    named = [token for token, _ in params.logit_bias]
    named += [*params.allowed_token_ids, *(token for words in params.bad_tokens for token in words)]
    return max((*named, *row.stop_token_ids), default=0)
