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
    """The log-probabilities of a request's continuations, filled as its branches run."""

    request: Request
    tokens: int  # tokens of the context and of the trie of continuations
    positions: int  # positions whose logits score tokens
    unfinished: int  # number of unfinished branches
    logprobs: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    cached_tokens: int = 0  # context tokens that the first branch found in the cache
    error: RowError | None = None  # the first error of any branch

    def store(
        self, slots: NDArray[np.int64], logprobs: NDArray[np.float32], greedy: NDArray[np.bool_]
    ) -> None:
        """Store the log-probabilities of some tokens. Tokens that run again after a preemption are stored again."""
        self.logprobs[slots], self.greedy[slots] = logprobs, greedy

    @property
    def output(self) -> Scores | None:
        """The scores of the request, or None if a branch failed or a log-probability is not finite."""
        whole = self.error is None and bool(np.isfinite(self.logprobs).all())
        return Scores(self.logprobs, self.greedy, self.request.params.scored) if whole else None


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBranch:
    """The branch that a sequence runs, and the scores of its request."""

    branch: Branch
    scores: RequestScores
    is_first: bool  # True for the first branch of the request

    def store(self, start: int, end: int, found: TokenScores, offset: int) -> int:
        """Store the scores of positions [start, end), which begin at `offset` in `found`. Return their number."""
        slots = self.branch.slots[self.branch.asked(start, end)]
        own = slice(offset, offset + len(slots))
        self.scores.store(slots, found.logprobs[own], found.greedy[own])
        return len(slots)

    def finish(self, error: RowError | None, cached_tokens: int) -> bool:
        """Record the end of the branch. Return True if it was the last branch of its request."""
        scores = self.scores
        scores.error = scores.error or error
        scores.cached_tokens = cached_tokens if self.is_first else scores.cached_tokens
        scores.unfinished -= 1
        return scores.unfinished == 0


class PromptScores:
    """The log-probabilities of a prompt's tokens except the first, filled as the prompt runs."""

    __slots__ = ("_found", "branch", "likeliest", "scored")

    def __init__(self, prompt: TokenIds, likeliest: int) -> None:
        """Create an empty store.

        Args:
            prompt: The token ids.
            likeliest: The number of most likely tokens whose log-probabilities are stored per position.
        """
        self.branch, self.likeliest = Branch.of_prompt(prompt), likeliest
        # Allocated with the first scores, because many prompts may wait
        self._found: TokenLogprobs | None = None
        self.scored = 0  # number of leading tokens with scores

    @property
    def complete(self) -> bool:
        """True if all tokens are scored."""
        return self.scored == len(self.branch.targets)

    def needs(self, start: int, end: int) -> bool:
        """Return True if positions [start, end) must be scored. A complete prompt that runs again need not be."""
        asked = self.branch.asked(start, end)
        return asked.stop > asked.start and not self.complete

    def store(self, start: int, end: int, found: TokenScores, offset: int) -> int:
        """Store the scores of positions [start, end), which begin at `offset` in `found`. Return their number."""
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
        """The log-probabilities of the prompt, or None if logits were not finite."""
        assert self.complete, "the prompt has not run completely"
        found = self._arrays()
        return None if np.isnan(found.chosen).any() else PromptLogprobs(self.branch.tokens, found)


def scored_branches(request: Request) -> list[tuple[Request, ScoredBranch]]:
    """Return the branches of a scoring request, each with the request that an engine runs for it.

    Raises:
        ValueError: If the lengths of the continuations do not fit the prompt.
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
