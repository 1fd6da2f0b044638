"""Gives running sequences their drafts, and a constrained one only what its constraint allows."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Protocol, TypeAlias

from batchinfer.core.request import ConstraintFailed, TokenIds
from batchinfer.core.samples import StepSample
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.constraints import Constraint, ConstraintMasks
from batchinfer.engine.schedule.draft_tree import DraftTree, pruned
from batchinfer.engine.schedule.sequence import Sequence, SequenceStatus

# Tokens that may follow a sequence one behind the other, or a tree of them
Drafts: TypeAlias = Seq[int] | DraftTree


class Drafter(Protocol):
    """Proposes tokens that may follow sequences, as many as it pays to verify."""

    def propose(self, rows: Seq[Sequence], ahead: int, others: int) -> Iterable[tuple[Sequence, Drafts]]:
        """Return the drafts of those of these rows, which decode, that get any in the next step: tokens one behind the
        other, or a tree of them. `ahead`: the rows that decode, too, and whose last tokens are not known yet; `others`:
        the tokens that other sequences run in that step."""

    def waits(self, sequence: Sequence) -> bool:
        """Whether it pays to leave a sequence out of the step that is launched before its tokens are known, so that the
        step behind it can have drafts."""

    def holds(self, waiting: Seq[Sequence], ready: Seq[Sequence], plain: int) -> bool:
        """Whether it pays to launch the next step once the tokens of the one in flight are known, so that it has the
        rows that wait for these: `waiting`. `ready`: rows that decode and are not in flight; `plain`: how many rows
        are, and could run on without their tokens."""

    def verified(self, taken: AcceptedTokens) -> None:
        """Learn how many of a sequence's drafts were right."""

    def ended(self, sequence: Sequence) -> None:
        """Learn the answer of a sequence, which has ended."""

    def learn(self, answer: TokenIds) -> None:
        """Take an answer that another engine gave."""

    def stepped(self, sample: StepSample) -> StepSample:
        """Learn how long a step took; its sample with what drafts came to."""


class Drafting:
    """Lays drafts behind the tokens of sequences, with a mask behind each where the sequence has a constraint."""

    def __init__(self, drafter: Drafter, masks: ConstraintMasks | None) -> None:
        self.drafter, self._masks = drafter, masks

    def before_step(self, running: Iterable[Sequence], waiting: bool = True) -> bool:
        """Give sequences that decode their drafts for the next step; whether any has some. `waiting`: whether rows may
        wait for the tokens of that step, so as to have drafts in the one behind it."""
        rows, ahead, others, proposed = list[Sequence](), list[Sequence](), 0, False
        for sequence in running:
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            sequence.drafting = False
            if sequence.drafts:  # of a step that had no room for the sequence
                proposed = sequence.drafting = True
                others += 1 + sequence.drafts
            elif sequence.remaining != 1 or _room(sequence) < 1:
                others += max(1, sequence.remaining)
            elif sequence.placeholders:
                ahead.append(sequence)
            else:
                rows.append(sequence)
        for sequence, drafts in self.drafter.propose(rows, len(ahead), others):
            tree = drafts if isinstance(drafts, DraftTree) else DraftTree(drafts)
            proposed |= self._lay(sequence, tree.first(_room(sequence)))
        for sequence in ahead:
            sequence.drafting = waiting and self.drafter.waits(sequence)
        return proposed

    def holds(self, running: Iterable[Sequence]) -> bool:
        """Whether it pays to have the next step wait for the tokens of the one in flight. It never does while prompts
        are read, which take the device long enough."""
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
        return bool(waiting) and self.drafter.holds(waiting, ready, plain)

    def verified(self, taken: AcceptedTokens) -> None:
        """Tell the drafter what came of a sequence's drafts."""
        self.forget(taken.sequence)
        if taken.drafts:
            self.drafter.verified(taken)

    def forget(self, sequence: Sequence) -> None:
        """Forget the masks behind its drafts, which are verified or dropped."""
        if sequence.draft_masks and self._masks is not None:
            for mask in sequence.draft_masks:
                self._masks.drop(mask)
            sequence.draft_masks = []

    def _lay(self, sequence: Sequence, tree: DraftTree) -> bool:
        stops = sequence.stop_token_ids
        # The token that ends an answer is sampled behind the draft before it, and nothing follows it
        tree = pruned(tree, lambda at, _: tree.tokens[at] not in stops)
        self.forget(sequence)
        if sequence.constraint is not None and sequence.mask is not None:
            tree = self._allowed(sequence, sequence.constraint, tree)
        if not len(tree.tokens):
            return False
        sequence.propose(tree.tokens, tree.parents)
        sequence.drafting = True
        return True

    def _allowed(self, sequence: Sequence, constraint: Constraint, tree: DraftTree) -> DraftTree:
        """Return what a constraint allows of a tree, up to where the next tokens have to come: those are not sampled.
        The sequence gets the mask behind each."""
        masks, states = self._masks, dict[int, Constraint]()
        assert masks is not None, "a constraint without masks"

        def keeps(at: int, parent: int) -> bool:
            before = constraint if parent < 0 else states.get(parent)
            if before is None or not takes(state := before.fork(), tree.tokens[at]):
                return False
            sequence.draft_masks.append(masks.put(state.fork()))
            if not state.jump_forward():
                states[at] = state
            return True

        return pruned(tree, keeps)


def takes(state: Constraint, token: int) -> bool:
    """Let a constraint take a token; False: it may not come, or nothing that is sampled can follow it."""
    if not state.allows(token):
        return False
    try:
        state.take(token)
    except ConstraintFailed:
        return False
    return not (state.ended or state.over or state.failure)


def _room(sequence: Sequence) -> int:
    """Count the drafts that a sequence may have: the last token that it may get is sampled, not proposed."""
    return sequence.max_length - len(sequence) - 1
