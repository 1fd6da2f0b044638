"""The protocols of draft sources and draft models, and their proposals."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from batchinfer.core.samples import DraftName
from batchinfer.engine.drafts.draft_value import expected_accepted
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.draft_tree import DraftTree
from batchinfer.engine.schedule.sequence import Sequence

MOST_DRAFTS = 24  # maximum drafts per row and step
CONTEXT_TOKENS = 12  # last prompt tokens that sources keep before an answer, to match its beginning


class Proposal(NamedTuple):
    """Tokens that a draft source proposes to follow a sequence.

    Attributes:
        tokens: The proposed tokens.
        matched: The number of tokens before them that match an earlier text. A longer match makes acceptance more
            likely.
        agreed: True if several matches continue with the same token.
        tree: The tokens as a tree, if the acceptance probability of each token is known.
    """

    tokens: Seq[int]
    matched: int
    agreed: bool = False
    tree: DraftTree | None = None

    @property
    def kind(self) -> tuple[int, bool]:
        """The key by which proposals with a similar acceptance rate are counted: length of match, and agreement."""
        return min(self.matched, 32).bit_length(), self.agreed

    def expected_accepted(self, rate: float, count: int) -> float:
        """Return the expected number of accepted tokens if the first `count` tokens are verified.

        Args:
            rate: The probability that a token is accepted if the tokens before it are. Ignored for a tree, which has
                its own probabilities.
            count: The number of verified tokens.
        """
        return expected_accepted(rate, count) if self.tree is None else sum(self.tree.chances[:count])


class DraftSource(Protocol):
    """A draft source that searches known texts, such as the row's prompt or other answers."""

    @property
    def name(self) -> DraftName:
        """The name of the draft source in jobs and reports."""

    def propose(self, rows: Seq[Sequence], most: int) -> list[Proposal | None]:
        """Return a proposal for each row, or None if no text matches the end of the row.

        Args:
            rows: Running sequences whose tokens are all known, without drafts.
            most: Approximate maximum number of tokens per proposal.
        """

    def learn(self, text: array[int]) -> None:
        """Add a complete answer to the known texts.

        Args:
            text: The answer's tokens. For answers of this engine, the last `CONTEXT_TOKENS` of the prompt come first.
        """


class DraftingModel(Protocol):
    """A draft source that runs a model or draft heads. It is only queried if the expected gain exceeds its cost."""

    @property
    def name(self) -> DraftName:
        """The name of the draft source in reports."""

    @property
    def most_rows(self) -> int:
        """The maximum number of rows per call of `propose`."""

    @property
    def most_proposed(self) -> int:
        """The maximum number of proposed tokens per row."""

    def can_draft(self, row: Sequence) -> bool:
        """Return True if the model can propose tokens for a row (a running sequence)."""

    def seconds(self, rows: Seq[Sequence], count: int) -> float:
        """Return the estimated time to propose `count` tokens for each row, in seconds."""

    def expected(self, rate: float, count: int) -> float:
        """Return the expected number of accepted tokens if `count` tokens are proposed for a row.

        Args:
            rate: The measured acceptance rate of the model's tokens. Models with their own estimate ignore it.
            count: The number of proposed tokens.
        """

    def propose(self, rows: Seq[Sequence], count: int) -> list[DraftTree]:
        """Return a tree of up to `count` tokens for each row.

        Args:
            rows: Running sequences whose tokens are all known, without drafts, for which `can_draft` is True.
            count: The maximum number of tokens per tree.
        """

    def record_verified(self, tree: DraftTree, outcome: AcceptedTokens) -> None:
        """Learn acceptance rates from a verified tree.

        Args:
            tree: The tree that this source proposed.
            outcome: The result of the step that verified it.
        """

    def fade(self, share: float) -> None:
        """Scale the counts of verified and accepted tokens by 1 - `share`, so that newer results weigh more."""

    def finish(self, row: Sequence) -> None:
        """Delete the state of a sequence that has ended."""
