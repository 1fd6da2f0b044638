"""The protocol of what proposes tokens, and a proposal."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

from batchinfer.core.samples import DraftName
from batchinfer.engine.drafts.worth import expected_right
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.draft_tree import DraftTree
from batchinfer.engine.schedule.sequence import Sequence

MOST_DRAFTS = 24  # of a row in a step
LAST_WORDS = 12  # tokens by which the beginning of an answer can be recognised


class Proposal(NamedTuple):
    """Tokens that may follow a sequence."""

    tokens: Seq[int]
    matched: int  # how many tokens before them the source recognised: the more, the likelier they are
    agreed: bool = False  # whether several places agree on the first of them
    tree: DraftTree | None = None  # these tokens, where it is known how likely each of them is to be right

    @property
    def kind(self) -> tuple[int, bool]:
        """The proposals whose tokens are about as likely as these."""
        return min(self.matched, 32).bit_length(), self.agreed

    def right(self, rate: float, count: int) -> float:
        """Return how many of the first `count` tokens are expected to be right. rate: how likely each of such ones is
        where those before it are."""
        return expected_right(rate, count) if self.tree is None else sum(self.tree.chances[:count])


class DraftSource(Protocol):
    """Proposes tokens from one kind of knowledge."""

    @property
    def name(self) -> DraftName:
        """The name by which jobs and reports know it."""

    def propose(self, rows: Seq[Sequence], most: int) -> list[Proposal | None]:
        """Return what may follow each of these sequences, about so many tokens at most; None: nothing is known. No
        sequence has drafts or placeholders."""

    def learn(self, text: array[int]) -> None:
        """Take a whole answer, of this engine with the LAST_WORDS of its prompt before it."""


class DraftingModel(Protocol):
    """Proposes tokens by computing them, which takes time: it is asked where that pays."""

    @property
    def name(self) -> DraftName:
        """The name by which reports know it."""

    @property
    def most_rows(self) -> int:
        """The most rows that it is asked about at once."""

    @property
    def most_proposed(self) -> int:
        """The most tokens that it proposes of a row."""

    def takes(self, row: Sequence) -> bool:
        """Whether it can be asked about a row."""

    def seconds(self, rows: Seq[Sequence], count: int) -> float:
        """Return about how long it takes to propose `count` tokens of each of these rows."""

    def expected(self, rate: float, count: int) -> float:
        """Return how many of `count` tokens that it proposes of a row are expected to be right. rate: how likely each
        of its tokens was where those before it were, as far as it does not know better."""

    def propose(self, rows: Seq[Sequence], count: int) -> list[DraftTree]:
        """Return up to `count` tokens that may follow each of these rows. No sequence has drafts or placeholders."""

    def verified(self, tree: DraftTree, taken: AcceptedTokens) -> None:
        """Learn what came of a proposal that says how likely its tokens are."""

    def fade(self, share: float) -> None:
        """Forget a share of what was learnt."""

    def ended(self, row: Sequence) -> None:
        """Forget a row, which has ended."""
