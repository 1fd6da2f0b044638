"""Collects the log-probabilities of scored tokens: of continuations and of prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.continuations import Branch, Continuations
from batchinfer.core.request import (
    PromptLogprobs,
    Request,
    RowError,
    Scores,
    TokenIds,
    TokenLogprobs,
    common_prefix,
)
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.schedule.step_plan import TokenScores

_PROMPT_ONLY = SamplingParams(max_tokens=0, ignore_eos=True)


@dataclass(slots=True, eq=False)
class RequestScores:
    """The log-probabilities of the tokens of a request's continuations, filled as its branches run.

    A branch is a path through the trie of continuations, which runs as one sequence.

    Attributes:
        request: The request.
        tokens: The number of tokens that must be computed: the context and the nodes of the trie.
        positions: The number of positions whose logits give log-probabilities.
        unfinished: The number of branches that have not ended.
        logprobs: [n], the log-probability of each token of all continuations, concatenated; NaN until it is computed.
        greedy: [n], True for each token that has the highest logit.
        cached_tokens: The number of context tokens that the first branch found in the prefix cache.
        error: The first error of any branch, or None.
    """

    request: Request
    tokens: int
    positions: int
    unfinished: int
    logprobs: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    cached_tokens: int = 0
    error: RowError | None = None

    def store(
        self, slots: NDArray[np.int64], logprobs: NDArray[np.float32], greedy: NDArray[np.bool_]
    ) -> None:
        """Store the log-probabilities of m tokens. Earlier values of the same tokens are overwritten.

        Args:
            slots: [m], the index of each token among the tokens of all continuations.
            logprobs: [m], the log-probability of each token.
            greedy: [m], True for each token that has the highest logit.
        """
        self.logprobs[slots], self.greedy[slots] = logprobs, greedy

    @property
    def output(self) -> Scores | None:
        """The scores of all continuations, or None if a branch failed or a log-probability is not finite."""
        whole = self.error is None and bool(np.isfinite(self.logprobs).all())
        return Scores(self.logprobs, self.greedy, self.request.params.scored) if whole else None


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBranch:
    """A path through the trie of a request's continuations, which a sequence runs and scores.

    Attributes:
        branch: The tokens of the path, and for each position the tokens whose log-probabilities are computed there.
        scores: The scores of the request, which all its branches fill.
        is_first: True for the first branch of the request.
    """

    branch: Branch
    scores: RequestScores
    is_first: bool

    def store(self, start: int, end: int, found: TokenScores, offset: int) -> int:
        """Store the scores that a step computed at the positions [start, end) of the branch.

        Args:
            start: The first position.
            end: The position after the last one.
            found: The scores of all chunks of the step, concatenated.
            offset: The index of the branch's first score in `found`.

        Returns:
            The number of scores that belong to the branch.
        """
        slots = self.branch.slots[self.branch.asked(start, end)]
        own = slice(offset, offset + len(slots))
        self.scores.store(slots, found.logprobs[own], found.greedy[own])
        return len(slots)

    def finish(self, error: RowError | None, cached_tokens: int) -> bool:
        """Record that the branch has ended.

        Args:
            error: The error of the branch, or None if it succeeded.
            cached_tokens: The number of tokens that the branch found in the prefix cache.

        Returns:
            True if all branches of the request have ended.
        """
        scores = self.scores
        scores.error = scores.error or error
        scores.cached_tokens = cached_tokens if self.is_first else scores.cached_tokens
        scores.unfinished -= 1
        return scores.unfinished == 0


class PromptScores:
    """The log-probabilities of all tokens of a prompt except the first one, filled as the prompt runs."""

    __slots__ = ("_found", "branch", "likeliest", "scored")

    def __init__(self, prompt: TokenIds, likeliest: int) -> None:
        """Create an object without any log-probabilities.

        Args:
            prompt: The token ids of the prompt.
            likeliest: The number of most likely tokens whose log-probabilities are stored per position.
        """
        self.branch, self.likeliest = Branch.of_prompt(prompt), likeliest
        # Allocated with the first scores, because many prompts may wait
        self._found: TokenLogprobs | None = None
        self.scored = 0  # number of leading tokens with scores

    @property
    def complete(self) -> bool:
        """True if the log-probabilities of all tokens of the prompt are stored."""
        return self.scored == len(self.branch.targets)

    def needs(self, start: int, end: int) -> bool:
        """Return True if a step that runs the positions [start, end) must compute log-probabilities of the prompt.

        If the prompt runs again after all log-probabilities were stored, it need not.
        """
        asked = self.branch.asked(start, end)
        return asked.stop > asked.start and not self.complete

    def store(self, start: int, end: int, found: TokenScores, offset: int) -> int:
        """Store the log-probabilities that a step computed at the positions [start, end) of the prompt.

        Args:
            start: The first position.
            end: The position after the last one.
            found: The log-probabilities of all chunks of the step, concatenated.
            offset: The index of the prompt's first log-probability in `found`.

        Returns:
            The number of log-probabilities that belong to the prompt.
        """
        own = self.branch.asked(start, end)
        count: int = own.stop - own.start
        theirs, kept = slice(offset, offset + count), self._arrays()
        kept.chosen[own] = found.logprobs[theirs]
        kept.top[own] = found.top[theirs, : kept.top.shape[1]]
        kept.top_ids[own] = found.top_ids[theirs, : kept.top.shape[1]]
        self.scored = max(self.scored, own.stop)
        return count

    def _arrays(self) -> TokenLogprobs:
        if self._found is None:
            count, most = len(self.branch.targets), self.likeliest
            tops = np.zeros((count, most), np.float32), np.zeros((count, most), np.int32)
            self._found = TokenLogprobs(np.zeros(count, np.float32), *tops)
        return self._found

    @property
    def output(self) -> PromptLogprobs | None:
        """The log-probabilities of the prompt, or None if logits were not finite. All must have been stored."""
        assert self.complete, "the prompt has not run completely"
        found = self._arrays()
        return None if np.isnan(found.chosen).any() else PromptLogprobs(self.branch.tokens, found)


def scored_branches(request: Request) -> list[tuple[Request, ScoredBranch]]:
    """Return the branches of a request that scores continuations.

    A branch is a path through the trie of the request's continuations.

    Args:
        request: The request.

    Returns:
        For each branch: the request that an engine runs for the branch, and the branch.

    Raises:
        ValueError: A continuation is empty, or no token comes before the continuations.
    """
    parts = Continuations.of(request.prompt, request.params.scored)
    branches = parts.branches()
    context, slots = len(parts.context), sum(request.params.scored)
    nodes = sum(len(one.tokens) - one.first for one in branches)
    nan, no = np.full(slots, np.nan, np.float32), np.zeros(slots, np.bool_)
    scores = RequestScores(request, context - 1 + nodes, nodes, len(branches), nan, no)
    follow = [common_prefix(one.tokens, other.tokens) for one, other in pairwise(branches)]
    follow.append(min(request.shares_next, context))
    params = _PROMPT_ONLY if not (name := request.params.adapter) else replace(_PROMPT_ONLY, adapter=name)
    return [
        (Request(request.key, one.tokens, params, shared), ScoredBranch(one, scores, at == 0))
        for at, (one, shared) in enumerate(zip(branches, follow, strict=True))
    ]
