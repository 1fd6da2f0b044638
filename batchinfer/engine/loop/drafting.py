"""Adds draft tokens to running sequences, within their constraints."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol, TypeAlias

from batchinfer.core.request import ConstraintFailed, TokenIds
from batchinfer.core.samples import StepSample
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.constraints import Constraint, ConstraintMasks
from batchinfer.engine.schedule.draft_tree import DraftTree, prune
from batchinfer.engine.schedule.sequence import Sequence, SequenceStatus

# Consecutive tokens after a sequence, or a tree of alternatives
Drafts: TypeAlias = Seq[int] | DraftTree


class Drafter(Protocol):
    """Chooses the draft tokens that each step verifies. A row is a running sequence."""

    def propose(self, rows: Seq[Sequence], ahead: int, others: int) -> Iterable[tuple[Sequence, Drafts]]:
        """Return the rows that get drafts in the next step, with their drafts.

        Args:
            rows: Decoding rows whose tokens are all known and that have no drafts yet.
            ahead: The number of other decoding rows, whose newest tokens are in flight.
            others: The number of tokens that rows in prefill run in the step.
        """

    def should_hold_row(self, sequence: Sequence) -> bool:
        """Return True if a sequence in flight should skip the next step, to have drafts in the step after it.

        The next step is launched before the sequence's newest tokens are known, so the sequence can have no drafts in
        the next step.
        """

    def should_hold_step(self, waiting: Seq[Sequence], ready: Seq[Sequence], plain: int) -> bool:
        """Return True if the next step should be launched only after the tokens of the step in flight are known.

        Args:
            waiting: The rows in flight that can have drafts in the next step if it is launched later.
            ready: The decoding rows that are not in flight.
            plain: The number of rows in flight that run in the next step, without drafts, before their tokens are
                known.
        """

    def record_verified(self, outcome: AcceptedTokens) -> None:
        """Learn from a step that verified drafts of a sequence.

        Args:
            outcome: The drafts that the step ran for the sequence, and which of them were accepted.
        """

    def finish(self, sequence: Sequence) -> None:
        """Delete the state of a sequence that has ended, and use its answer for later drafts."""

    def learn(self, answer: TokenIds) -> None:
        """Use an answer that another engine generated for later drafts.

        Args:
            answer: The tokens of the answer.
        """

    def record_step(self, sample: StepSample) -> StepSample:
        """Learn from the duration of a step.

        Args:
            sample: The measurements of the step.

        Returns:
            The sample with its draft fields filled: the numbers of verified and accepted drafts, and the time that
            drafts took and saved.
        """


class Drafting:
    """Appends draft tokens to sequences before each step. A constrained sequence also gets a token mask per draft.

    Args:
        drafter: Chooses the drafts.
        masks: The token masks of constraints. None: no sequence has a constraint.
    """

    def __init__(self, drafter: Drafter, masks: ConstraintMasks | None) -> None:
        self.drafter, self._masks = drafter, masks

    def before_step(self, running: Iterable[Sequence], waiting: bool = True) -> bool:
        """Append drafts to decoding sequences before the next step is scheduled.

        Sequences that should skip a step to have drafts in a later step are marked.

        Args:
            running: The running sequences.
            waiting: True if sequences may skip a step. If False, no sequence is marked.

        Returns:
            True if any sequence has drafts.
        """
        rows, ahead, others, proposed = list[Sequence](), list[Sequence](), 0, False
        for sequence in running:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            sequence.drafting = False
            if sequence.drafts:  # left from a step that had no room for the sequence
                proposed = sequence.drafting = True
                others += 1 + sequence.drafts
            elif sequence.remaining != 1 or _max_drafts(sequence) < 1:
                others += max(1, sequence.remaining)
            elif sequence.placeholders:
                ahead.append(sequence)
            else:
                rows.append(sequence)
        for sequence, drafts in self.drafter.propose(rows, len(ahead), others):
            tree = drafts if isinstance(drafts, DraftTree) else DraftTree(drafts)
            proposed |= self._attach(sequence, tree.first(_max_drafts(sequence)))
        for sequence in ahead:
            sequence.drafting = waiting and self.drafter.should_hold_row(sequence)
        return proposed

    def should_hold_step(self, running: Iterable[Sequence]) -> bool:
        """Return True if the next step should be launched only after the tokens of the step in flight are known.

        During prefill, the result is False, because prefill keeps the device busy anyway.

        Args:
            running: The running sequences.
        """
        waiting, ready, plain = list[Sequence](), list[Sequence](), 0
        for sequence in running:
            if sequence.status is SequenceStatus.AWAITING_TOKENS:
                waiting.append(sequence)
            elif sequence.remaining != 1:
                return False
            elif sequence.placeholders:
                plain += 1
            else:
                ready.append(sequence)
        return bool(waiting) and self.drafter.should_hold_step(waiting, ready, plain)

    def record_verified(self, outcome: AcceptedTokens) -> None:
        """Pass the result of verifying a sequence's drafts to the drafter, and drop the token masks of these drafts.

        Args:
            outcome: The drafts that a step ran for the sequence, and which of them were accepted.
        """
        self.drop_masks(outcome.sequence)
        if outcome.drafts:
            self.drafter.record_verified(outcome)

    def drop_masks(self, sequence: Sequence) -> None:
        """Drop the token masks that were created for a sequence's drafts."""
        if sequence.draft_masks and self._masks is not None:
            for mask in sequence.draft_masks:
                self._masks.drop(mask)
            sequence.draft_masks = []

    def _attach(self, sequence: Sequence, tree: DraftTree) -> bool:
        stops = sequence.stop_token_ids
        # A stop token is never proposed: it can be sampled after the draft before it, and nothing follows it
        tree = prune(tree, lambda at, _: tree.tokens[at] not in stops)
        self.drop_masks(sequence)
        if sequence.constraint is not None and sequence.mask is not None:
            tree = self._prune_disallowed(sequence, sequence.constraint, tree)
        if not len(tree.tokens):
            return False
        sequence.propose(tree.tokens, tree.parents)
        sequence.drafting = True
        return True

    def _prune_disallowed(self, sequence: Sequence, constraint: Constraint, tree: DraftTree) -> DraftTree:
        # A branch also ends if the constraint forces the next tokens, because forced tokens are not sampled
        masks, states = self._masks, dict[int, Constraint]()
        assert masks is not None, "a constraint without masks"

        def keeps(at: int, parent: int) -> bool:
            before = constraint if parent < 0 else states.get(parent)
            if before is None or not accept_token(state := before.fork(), tree.tokens[at]):
                return False
            sequence.draft_masks.append(masks.put(state.fork()))
            if not state.jump_forward():
                states[at] = state
            return True

        return prune(tree, keeps)


def accept_token(state: Constraint, token: int) -> bool:
    """Advance the state of a constraint by a draft token, and return True if a draft may follow the token.

    Args:
        state: The state, which is changed.
        token: The draft token.

    Returns:
        False if the constraint forbids the token, or if no further token can be sampled under the constraint.
    """
    if not state.allows(token):
        return False
    try:
        state.take(token)
    except ConstraintFailed:
        return False
    return not (state.ended or state.over or state.failure)


def _max_drafts(sequence: Sequence) -> int:
    # The last possible token is sampled, not drafted
    return sequence.max_length - len(sequence) - 1
