"""Branches of continuations and prompts keep what was found of the tokens that are scored in them."""

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
    """The log-probabilities of a request's continuations, as far as its branches have run."""

    request: Request
    tokens: int  # of its context and the trie of its continuations
    positions: int  # whose logits score tokens
    unfinished: int  # branches
    logprobs: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    cached_tokens: int = 0  # of its context, that its first branch found in the cache
    error: RowError | None = None  # of any branch

    def take(
        self, slots: NDArray[np.int64], logprobs: NDArray[np.float32], greedy: NDArray[np.bool_]
    ) -> None:
        """Take the log-probabilities of some tokens. What runs again after a preemption is taken again."""
        self.logprobs[slots], self.greedy[slots] = logprobs, greedy

    @property
    def output(self) -> Scores | None:
        """The scores of the request; None where a branch failed, or a logarithm is not a finite number."""
        whole = self.error is None and bool(np.isfinite(self.logprobs).all())
        return Scores(self.logprobs, self.greedy, self.request.params.scored) if whole else None


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBranch:
    """The branch that a sequence runs, and the scores to which it adds."""

    branch: Branch
    scores: RequestScores
    is_first: bool  # of its request

    def take(self, start: int, end: int, found: TokenScores, begun: int) -> int:
        """Take what was asked of the positions [start, end), which stands from `begun` on in `found`; how many these
        are."""
        slots = self.branch.slots[self.branch.asked(start, end)]
        own = slice(begun, begun + len(slots))
        self.scores.take(slots, found.logprobs[own], found.greedy[own])
        return len(slots)

    def ended(self, error: RowError | None, cached_tokens: int) -> bool:
        """Say that the branch has ended. Return whether it was the last one of its request."""
        scores = self.scores
        scores.error = scores.error or error
        scores.cached_tokens = cached_tokens if self.is_first else scores.cached_tokens
        scores.unfinished -= 1
        return scores.unfinished == 0


class PromptScores:
    """The log-probabilities of a prompt's tokens, as far as it has run: of all but the first."""

    __slots__ = ("_found", "_taken", "branch", "likeliest")

    def __init__(self, prompt: TokenIds, likeliest: int) -> None:
        """likeliest: of how many of the likeliest tokens at each place log-probabilities are wanted, too."""
        self.branch, self.likeliest = Branch.of_prompt(prompt), likeliest
        self._found: TokenLogprobs | None = None  # made once something is known: many prompts may wait
        self._taken = 0  # tokens of which they are known, from the first on that has one

    @property
    def taken(self) -> int:
        """Count the tokens that have been scored."""
        return self._taken

    @property
    def complete(self) -> bool:
        """Whether those of all tokens are known."""
        return self._taken == len(self.branch.targets)

    def lacks(self, start: int, end: int) -> bool:
        """Whether something is asked of the positions [start, end). Once all is known, a prompt that runs again after a
        preemption is asked nothing."""
        asked = self.branch.asked(start, end)
        return asked.stop > asked.start and not self.complete

    def take(self, start: int, end: int, found: TokenScores, begun: int) -> int:
        """Take what was asked of the positions [start, end), which stands from `begun` on in `found`; how many these
        are."""
        own = self.branch.asked(start, end)
        count: int = own.stop - own.start
        theirs, kept = slice(begun, begun + count), self._arrays()
        kept.chosen[own] = found.logprobs[theirs]
        kept.top[own] = found.top[theirs, : kept.top.shape[1]]
        kept.top_ids[own] = found.top_ids[theirs, : kept.top.shape[1]]
        self._taken = max(self._taken, own.stop)
        return count

    def _arrays(self) -> TokenLogprobs:
        if self._found is None:
            count, most = len(self.branch.targets), self.likeliest
            tops = np.zeros((count, most), np.float32), np.zeros((count, most), np.int32)
            self._found = TokenLogprobs(np.zeros(count, np.float32), *tops)
        return self._found

    @property
    def output(self) -> PromptLogprobs | None:
        """The log-probabilities of the whole prompt; None where logits were not finite numbers."""
        assert self.complete, "a prompt that has run is known"
        found = self._arrays()
        return None if np.isnan(found.chosen).any() else PromptLogprobs(self.branch.tokens, found)


def scored_branches(request: Request) -> list[tuple[Request, ScoredBranch]]:
    """Return the branches of a request, each with the request that an engine runs for it. Raises ValueError for lengths
    that do not fit its prompt."""
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
