"""The state of an answer under a compiled grammar."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import TYPE_CHECKING

from batchinfer.core.request import ConstraintFailed, RowError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from batchinfer.input.constraints.grammar_tokenizer import GrammarTokenizer


class GrammarConstraint:
    """The state of one answer under a compiled grammar: which tokens the answer has, and which may come next.

    Attributes:
        needs_end: Always True: an answer that is truncated at its token limit is invalid.
        over: Always False: the grammar applies to the whole answer.
        begun: True if the answer has a token.
    """

    __slots__ = ("_matcher", "_own", "_problem", "_tokenizer", "begun")

    needs_end = True  # an answer that ends early, at its token limit, is incomplete
    over = False  # the constraint applies to the whole answer

    def __init__(self, compiled: LLMatcher, tokenizer: GrammarTokenizer) -> None:
        self._matcher, self._own, self._tokenizer = compiled, False, tokenizer
        self._problem: str | None = None
        self.begun = False  # True after the first token

    @property
    def ended(self) -> bool:
        """True if the answer is complete under the grammar."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    @property
    def followed(self) -> GrammarConstraint:
        """The constraint that determines the mask of the next token: always this object."""
        return self

    @property
    def failure(self) -> RowError | None:
        """The error of a row whose constraint cannot be followed, or None."""
        if self._matcher.is_error():
            return row_error(self._matcher.get_error())
        return row_error(self._problem) if self._problem is not None else None

    def take(self, token: int) -> None:
        """Add the next generated token of the answer to its state.

        Raises ConstraintFailed if the grammar forbids the token.
        """
        if not self.matcher.consume_token(token):
            raise ConstraintFailed(self.failure or row_error("a token came that may not come next"))
        self.begun = True

    def allows(self, token: int) -> bool:
        """Return True if this token may certainly be the next token of the answer.

        If it returns False, the mask of the next token decides: llguidance cannot check every token on its own.
        """
        # Querying a token outside the tokenizer's vocabulary would put llguidance into an error state
        return self._tokenizer.asks_one(token, self.begun) and bool(self._matcher.validate_tokens([token]))

    def fork(self) -> GrammarConstraint:
        """Return an independent copy of the state of the answer."""
        own = GrammarConstraint(self._matcher.deep_copy() if self._own else self._matcher, self._tokenizer)
        own._own, own._problem, own.begun = self._own, self._problem, self.begun
        return own

    def jump_forward(self) -> Seq[int]:
        """Return the next tokens of the answer for which the model has no choice. They are not added to the state.

        Empty if the model can choose the next token.
        """
        tokens = self._matcher.compute_ff_tokens()
        if not tokens or not (self.begun or self._tokenizer.begins(tokens[0])):
            return ()
        return list(takewhile(self._tokenizer.gives, tokens))

    def mark_failed(self) -> None:
        """Mark the answer as failed, because the grammar allows none of the model's tokens next."""
        self._problem = "no token of the model can continue the answer"
        if not self.begun and self._tokenizer.drops_space:
            self._problem += (
                "; it may have to begin with a space, which decoding leaves out with this tokenizer"
            )

    @property
    def matcher(self) -> LLMatcher:
        """The answer's own copy of the compiled grammar, whose state advances with each token.

        Made at the first access.
        """
        if not self._own:
            self._matcher, self._own = self._matcher.deep_copy(), True
        return self._matcher


def row_error(problem: str) -> RowError:
    """Return the error of a row whose constraint cannot be followed.

    Args:
        problem: The problem, often a message of llguidance, which is reworded.
    """
    from batchinfer.input.constraints.constraint_wording import reword_message

    return RowError(
        "constraint_failed", "policy", f"the constraint cannot be followed: {reword_message(problem)}"
    )
