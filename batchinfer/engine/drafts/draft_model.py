"""A draft model, which shares the block numbers of the target model's KV cache."""

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
from batchinfer.core.samples import DraftSourceName
from batchinfer.engine.drafts.acceptance import NodeAcceptance
from batchinfer.engine.drafts.draft_value import expected_accepted
from batchinfer.engine.drafts.proposal_times import ProposalTimes
from batchinfer.engine.loop.drafting import accept_token
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.runner.runner import Runner
from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.engine.schedule.draft_tree import DraftTree, compact_parents
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, Step
from batchinfer.engine.schedule.sequence import CollectedLogprobs, Sequence, SequenceStatus
from batchinfer_kernels.cost import Peaks

MOST_PROPOSED = 16  # maximum proposed tokens per row and query
MOST_ROWS = 256  # maximum rows per query
LEAVES = 3  # alternatives to each token of the chain in a draft tree
_BELIEVED = 0.75  # prior acceptance rate of a token of the chain


def spare_blocks(block_size: int, max_num_seqs: int) -> int:
    """Return the number of KV cache blocks that a draft model needs in addition to the target model's blocks.

    Proposed tokens are written to them if the blocks of their sequence are full.

    Args:
        block_size: The number of tokens per block.
        max_num_seqs: Maximum number of running sequences of the engine.
    """
    return min(MOST_ROWS, max_num_seqs) * -(-MOST_PROPOSED // block_size)


@dataclass(frozen=True, slots=True, eq=False)
class DraftModelRunner:
    """A loaded draft model, with the settings of the engine and the target model that it depends on.

    Attributes:
        runner: Runs the draft model. Its KV cache has `blocks` blocks, followed by the draft model's spare blocks.
        roots: The maximum length of a sequence of the draft model, and the start values of content hashes of blocks.
        vocab: The vocabulary size of the draft model.
        blocks: The number of KV cache blocks of the target model.
        max_num_seqs: Maximum number of running sequences of the engine.
        most_tokens: Maximum number of tokens per step of the draft model.
        table: The index of the target model's cache group whose block tables the draft model uses.
        target_vocab: The vocabulary size of the target model.
        eos_token_ids: The end-of-sequence tokens of the target model.
        masks: The token masks of constraints. None: proposals ignore constraints.
        head: True for draft heads, which read hidden states in addition to tokens. False for a draft model.
        branches: True if proposals may be trees.
    """

    runner: Runner
    roots: ContentRoots
    vocab: int
    blocks: int
    max_num_seqs: int
    most_tokens: int
    table: int
    target_vocab: int
    eos_token_ids: frozenset[int]
    masks: ConstraintMasks | None
    head: bool = False
    branches: bool = False


class _Prediction(NamedTuple):
    """A token that the draft model proposes.

    Attributes:
        token: The id of the token.
        chance: The probability that the draft model gives it; 0 if proposals are not trees.
        others: The most likely other tokens, as (token id, probability); empty if proposals are not trees.
    """

    token: int
    chance: float = 0.0
    others: Seq[tuple[int, float]] = ()


@dataclass(slots=True, eq=False)
class _RowState:
    """The draft model's state of a sequence that the target model runs.

    Attributes:
        row: The sequence of the target model.
        own: The sequence that the draft model runs: a copy of `row`, followed by proposed tokens. For draft heads, the
            first token of `row` is left out.
        preemptions: The number of preemptions of `row` when this state was created.
        confirmed: The number of leading tokens of `own` that are tokens of `row`, not proposals.
        kept_positions: The number of leading positions whose blocks the target model keeps until the next query,
            unless it preempts `row`.
        mask: The number of the token mask of the row's constraint while the draft model proposes, or None.
    """

    row: Sequence
    own: Sequence
    preemptions: int
    confirmed: int = 0
    kept_positions: int = 0
    mask: int | None = None


class DraftModelSource:
    """A draft source that runs a small draft model, or draft heads with their own KV cache, such as EAGLE.

    A row (a running sequence) is prefilled by the draft model when its first proposal is requested. The draft model
    has a KV cache of its own, but uses the target model's block tables, so both models share prefixes and preempt in
    the same way. Proposals follow the row's sampling parameters and constraint.

    If the configuration allows branches, a proposal is a tree: the chain of the tokens that the draft model chose, and
    as leaves the next most likely tokens at each position.
    """

    most_proposed = MOST_PROPOSED  # maximum number of proposed tokens per row

    def __init__(
        self, config: DraftModelRunner, peaks: Peaks, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._config, self._clock = config, clock
        self._size = config.runner.layout.block_size
        self._times = ProposalTimes(config.runner.cost, peaks)
        self._writer = PlanWriter(config.eos_token_ids, config.runner.wants)
        self._offset = int(config.head)  # heads read the next token at each position
        self._states: dict[Sequence, _RowState] = {}
        # Content hashes of full prompt blocks that are computed, by block
        self._contents: dict[int, bytes] = {}
        self._acceptance = NodeAcceptance()

    @property
    def name(self) -> DraftSourceName:
        """The name of this draft source in reports: "heads" for draft heads, "model" for a draft model."""
        return "heads" if self._config.head else "model"

    @property
    def most_rows(self) -> int:
        """The maximum number of rows for which `propose` can be called at once."""
        return min(MOST_ROWS, self._config.max_num_seqs)

    def can_draft(self, row: Sequence) -> bool:
        """Return True if the draft model can run a row (a running sequence) with the longest possible proposal.

        It cannot if the row and the proposal would exceed the draft model's context length. It cannot either if the
        draft model's vocabulary lacks a token of the row or of its sampling parameters.
        """
        config, length = self._config, len(row)
        if min(length + MOST_PROPOSED, row.max_length) > config.roots.max_model_len or length <= self._offset:
            return False
        return config.vocab >= config.target_vocab or (
            max(row.tokens) < config.vocab and _largest_named_token(row) < config.vocab
        )

    def seconds(self, rows: Seq[Sequence], count: int) -> float:
        """Return the estimated time in seconds to propose `count` tokens for each row.

        If the draft model must prefill a row first, a part of that time is included: the prefill serves all tokens
        that the row may still generate.
        """
        more = sum(self._unread(row) * min(1.0, (count + 1) / (row.max_length - len(row))) for row in rows)
        each, context = len(rows), sum(map(len, rows)) / len(rows)
        first = self._times.seconds(each + more, each, context)
        return first + (count - 1) * self._times.seconds(each, each, context)

    def expected(self, rate: float, count: int) -> float:
        """Return the expected number of accepted tokens of a chain of `count` tokens.

        Args:
            rate: The measured acceptance rate of this source's tokens. It is ignored if proposals may be trees: this
                source measures the rate of chains itself.
            count: The number of tokens of the chain. Leaves of a tree are not counted.
        """
        return expected_accepted(
            self._acceptance.rate("chain", _BELIEVED) if self._config.branches else rate, count
        )

    def record_verified(self, tree: DraftTree, outcome: AcceptedTokens) -> None:
        """Learn from a verified tree how often nodes are accepted.

        Args:
            tree: The tree that this source proposed.
            outcome: The result of the step that verified the tree.
        """
        self._acceptance.record_verified(tree, outcome)
        # Count each node also for the chain or for the leaves: `expected` needs the rate of the chain
        chain = ["other" if rank else "chain" for _, rank, _ in cast(Seq[_Kind], tree.kinds)]
        self._acceptance.record_verified(tree._replace(kinds=chain), outcome)

    def fade(self, share: float) -> None:
        """Multiply all counts of verified and accepted nodes by 1 - `share`, so that newer results weigh more."""
        self._acceptance.fade(share)

    def propose(self, rows: Seq[Sequence], count: int) -> list[DraftTree]:
        """Run the draft model and return for each row a draft tree of up to `count` tokens. A tree may be empty.

        Args:
            rows: At most `most_rows` sequences for which `can_draft` is True.
            count: The maximum number of tokens per tree. The model runs the prefill and up to `count` - 1 further
                steps.
        """
        states = [self._update(row, number) for number, row in enumerate(rows)]
        found: dict[Sequence, list[_Prediction]] = {one.own: [] for one in states}
        try:
            predictions, active = self._prefill(states), states
            for at in range(count):
                for one in active:
                    found[one.own].append(predictions[one.own])
                active = [one for one in active if self._append(one, predictions[one.own].token)]
                if not active or at + 1 == count:
                    break
                predictions = self._run([Chunk(one.own, one.own.computed, 1) for one in active])
        finally:
            for one in states:
                self._forget_mask(one)
        for one in states:
            self._note(one, one.confirmed - 1, one.own.computed)
        return [self._proposed(one, found[one.own]) for one in states]

    def _proposed(self, one: _RowState, given: Seq[_Prediction]) -> DraftTree:
        chain = one.own.tokens[one.confirmed :]
        if not self._config.branches:
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

    def finish(self, row: Sequence) -> None:
        """Delete the draft model's state of a sequence that has ended."""
        self._states.pop(row, None)

    def _unread(self, row: Sequence) -> int:
        one = self._states.get(row)
        valid = (
            self._reusable(row)
            if one is None or one.preemptions != row.preemptions
            else self._valid(one, row)
        )
        return max(0, len(row) - self._offset - 1 - valid)

    def _update(self, row: Sequence, place: int) -> _RowState:
        """Return the state of a row, updated with the tokens that the row got since the last query.

        Args:
            row: The sequence of the target model.
            place: The index of the row in the query. It determines the spare blocks of the row.
        """
        one = self._states.get(row)
        if one is None or one.preemptions != row.preemptions:
            one = self._states[row] = _RowState(row, self._copied(row), row.preemptions)
            valid = self._reusable(row)
        else:
            valid = self._valid(one, row)
        table, spare = row.tables[self._config.table], -(-MOST_PROPOSED // self._size)
        first = self._config.blocks + place * spare
        own = one.own
        own.tokens, own.tables = row.tokens[self._offset :], [[*table, *range(first, first + spare)]]
        own.computed = min(valid, len(own) - 1)
        # Later blocks may be freed: the target model has not computed them yet
        one.confirmed, one.kept_positions = len(own), -(-(len(row) - 1) // self._size) * self._size
        self._take_mask(one, row)
        # `_prefill`, which is called next, computes these blocks
        self._note(one, own.computed, one.confirmed)
        return one

    def _copied(self, row: Sequence) -> Sequence:
        roots, params, branches = self._config.roots, row.request.params, self._config.branches
        asks = replace(params, logprobs=LEAVES + 1, confidence=False) if branches else params
        return replace(
            row,
            request=replace(row.request, params=asks),
            plain_greedy=row.plain_greedy and not branches,
            prompt_length=row.prompt_length - self._offset,
            max_length=row.max_length - self._offset,
            tokens=row.tokens[self._offset :],
            logprobs=CollectedLogprobs() if branches else None,
            prompt_scores=None,
            constraint=None,
            mask=None,
            rope_offset=roots.rope_offset(row.prompt_length, params),
            status=SequenceStatus.RUNNING,
            freed=[0],
            draft_masks=[],
        )

    def _take_mask(self, one: _RowState, row: Sequence) -> None:
        own, masks = one.own, self._config.masks
        own.constraint = own.mask = None
        if masks is not None and row.constraint is not None and row.mask is not None:
            own.constraint = row.constraint.fork()
            own.mask = one.mask = masks.put(own.constraint)

    def _candidates(self, step: _Prediction, drawn: bool) -> list[tuple[int, float, _Kind]]:
        """Return the candidate tokens of a position as (token id, acceptance rate, kind), the model's own token first.

        Args:
            step: The model's token and its alternatives.
            drawn: True if the row is sampled, not greedy.
        """
        kind = drawn, 0, _level(step.chance)
        found, left = [(step.token, self._acceptance.rate(kind, _BELIEVED), kind)], max(1e-6, 1 - step.chance)
        for rank, (token, chance) in enumerate(step.others, 1):
            kind, believed = (drawn, rank, _level(chance)), (1 - found[0][1]) * min(1.0, chance / left)
            found.append((token, self._acceptance.rate(kind, believed), kind))
        return found

    def _forget_mask(self, one: _RowState) -> None:
        if one.mask is not None and self._config.masks is not None:
            self._config.masks.drop(one.mask)
            one.mask = one.own.mask = None

    def _valid(self, one: _RowState, row: Sequence) -> int:
        # Draft heads compute proposals from their own states, so positions of accepted proposals cannot be reused.
        own, same = one.own, one.confirmed
        most = min(one.kept_positions, own.computed, len(row))
        if self._offset:
            return min(same, most)
        while same < most and own.tokens[same] == row.tokens[same]:
            same += 1
        return min(same, most)

    def _reusable(self, row: Sequence) -> int:
        table, size = row.tables[self._config.table], self._size
        full = row.prompt_blocks(len(row), size)
        missing = (at for at in range(full) if self._contents.get(table[at]) != row.block_hash(at, size))
        return next(missing, full) * size

    def _note(self, one: _RowState, start: int, end: int) -> None:
        # The last proposed token is never written to the cache: nothing is proposed after it, and it may have no block
        row, size = one.row, self._size
        table, full = one.own.tables[0], row.prompt_blocks(one.confirmed, size)
        for at in range(start // size, -(-end // size)):
            if at < full:
                self._contents[table[at]] = row.block_hash(at, size)
            else:
                self._contents.pop(table[at], None)

    def _prefill(self, states: Seq[_RowState]) -> dict[Sequence, _Prediction]:
        predictions: dict[Sequence, _Prediction] = {}
        chunks, room = list[Chunk](), self._config.most_tokens
        for one in states:
            own = one.own
            start, end = own.computed, len(own.tokens)
            while start < end:
                length = min(room, end - start)
                chunks.append(Chunk(own, start, length))
                start, room = start + length, room - length
                if not room:
                    predictions |= self._run(chunks)
                    chunks, room = [], self._config.most_tokens
        return predictions | self._run(chunks) if chunks else predictions

    def _run(self, chunks: list[Chunk]) -> dict[Sequence, _Prediction]:
        began, sampling = self._clock(), [c.sequence for c in chunks if c.samples]
        plan = self._writer.of(Step(chunks=chunks), sampling)
        launched = self._config.runner.launch(plan)
        tokens, logprobs = launched.tokens(), launched.logprobs()
        for sequence, start, length in chunks:
            sequence.computed = start + length
        context = sum(c.end for c in chunks) / len(chunks)
        self._times.record_time(sum(c.length for c in chunks), len(chunks), context, self._clock() - began)
        return {
            sequence: _prediction(own[0], logprobs.get(place))
            for place, (sequence, own) in enumerate(zip(sampling, tokens, strict=True))
        }

    def _append(self, one: _RowState, token: int) -> bool:
        own, constraint = one.own, one.own.constraint
        if not 0 <= token < self._config.target_vocab or token in own.stop_token_ids:
            return False
        if constraint is not None and not accept_token(constraint, token):
            return False
        own.tokens.append(token)
        forced = constraint is not None and constraint.jump_forward()
        return not forced and len(own.tokens) < min(own.max_length, self._config.roots.max_model_len)


# True if the row is sampled; rank of the token; level of its probability, see _level
_Kind = tuple[bool, int, int]


class _Node(NamedTuple):
    """A candidate for a draft tree.

    Attributes:
        chance: The probability that this node and all its ancestors are accepted.
        parent: The index of the parent in the chain, or -1 for the sequence's last token.
        token: The id of the token.
        kind: The kind of node, per which acceptance is counted: (True if the sequence is sampled, the token's rank
            among the most likely ones, its probability in coarse levels).
    """

    chance: float
    parent: int
    token: int
    kind: _Kind

    @property
    def rank(self) -> int:
        return self.kind[1]


def _tree(nodes: Seq[_Node], most: int) -> DraftTree:
    # Parents come before their children: they are at least as likely
    chosen = sorted(nodes, key=lambda node: (-node.chance, node.parent, node.rank))[:most]
    places = {-1: -1} | {node.parent + 1: place for place, node in enumerate(chosen) if not node.rank}
    tokens, chances, kinds = ([getattr(n, name) for n in chosen] for name in ("token", "chance", "kind"))
    return DraftTree(tokens, compact_parents([places[node.parent] for node in chosen]), chances, kinds)


def _prediction(token: int, logprobs: TokenLogprobs | None) -> _Prediction:
    if logprobs is None or not np.isfinite(logprobs.chosen[0]):
        return _Prediction(token)
    each = zip(logprobs.top_ids[0].tolist(), np.exp(logprobs.top[0]).tolist(), strict=True)
    others = [(other, chance) for other, chance in each if other != token and chance > 0]
    return _Prediction(token, float(np.exp(logprobs.chosen[0])), others[:LEAVES])


def _level(chance: float) -> int:
    return min(16, round(-2 * log2(max(chance, 1e-9))))


def _largest_named_token(row: Sequence) -> int:
    params = row.request.params
    named = [token for token, _ in params.logit_bias]
    named += [*params.allowed_token_ids, *(token for words in params.bad_tokens for token in words)]
    return max((*named, *row.stop_token_ids), default=0)
