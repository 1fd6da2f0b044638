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
    """Tokens that may follow a sequence."""

    tokens: Seq[int]
    matched: int  # length of the match with earlier text; a longer match makes acceptance more likely
    agreed: bool = False  # True if several matches continue with the same token
    tree: DraftTree | None = None  # the tokens as a tree, if the probability of each token is known

    @property
    def kind(self) -> tuple[int, bool]:
        """The key of proposals with a similar acceptance rate."""
        return min(self.matched, 32).bit_length(), self.agreed

    def expected_accepted(self, rate: float, count: int) -> float:
        """Return the expected number of accepted tokens among the first `count` tokens.

        Args:
            rate: The probability that a token is accepted if the tokens before it are. A tree has its own.
            count: The number of tokens that are verified.
        """
        return expected_accepted(rate, count) if self.tree is None else sum(self.tree.chances[:count])


class DraftSource(Protocol):
    """A draft source that searches known texts."""

    @property
    def name(self) -> DraftName:
        """The name of the source in jobs and reports."""

    def propose(self, rows: Seq[Sequence], most: int) -> list[Proposal | None]:
        """Return a proposal for each row, or None if nothing matches.

        Args:
            rows: Sequences without drafts and placeholders.
            most: Approximate maximum number of tokens per proposal.
        """

    def learn(self, text: array[int]) -> None:
        """Add a complete answer to the known texts.

        Args:
            text: The answer's tokens. For answers of this engine, the last `CONTEXT_TOKENS` of the prompt come first.
        """


class DraftingModel(Protocol):
    """A draft source that runs a model. It is only queried when the expected gain exceeds its cost."""

    @property
    def name(self) -> DraftName:
        """The name of the source in reports."""

    @property
    def most_rows(self) -> int:
        """The maximum number of rows per query."""

    @property
    def most_proposed(self) -> int:
        """The maximum number of proposed tokens per row."""

    def can_draft(self, row: Sequence) -> bool:
        """Return True if the model can propose tokens for a row."""

    def seconds(self, rows: Seq[Sequence], count: int) -> float:
        """Return the estimated time to propose `count` tokens for each row, in seconds."""

    def expected(self, rate: float, count: int) -> float:
        """Return the expected number of accepted tokens if `count` tokens are proposed for a row.

        Args:
            rate: The measured acceptance rate of the model's tokens. Models with their own estimate ignore it.
            count: The number of proposed tokens.
        """

    def propose(self, rows: Seq[Sequence], count: int) -> list[DraftTree]:
        """Return up to `count` tokens for each row. The rows have neither drafts nor placeholders."""

    def record_verified(self, tree: DraftTree, outcome: AcceptedTokens) -> None:
        """Learn from the verification of a proposed tree."""

    def fade(self, share: float) -> None:
        """Scale all counts by 1 - `share` to give newer results more weight."""

    def finish(self, row: Sequence) -> None:
        """Forget a row that has ended."""
