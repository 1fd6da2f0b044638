"""Draft sources for tests that propose tokens of another run's answers, some of them wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Any

from batchinfer.core.samples import StepSample
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.schedule.draft_tree import DraftTree
from batchinfer.engine.schedule.sequence import Sequence
from tests.batchinfer.engine.small_engine import Ran

VOCAB = 9


Guess = Callable[[Sequence], Seq[int] | DraftTree]


class Drafts:
    """Proposes the tokens of `guess` for every row, at any cost."""

    def __init__(self, guess: Guess, waits: bool = True, holds: float = 0.0) -> None:
        self._guess, self._waits = guess, waits
        self._holds, self._random = holds, random.Random(0)
        self.took: list[tuple[int, int]] = []  # drafts, and how many of them were right

    def propose(
        self, rows: Seq[Sequence], ahead: int, others: int
    ) -> Iterable[tuple[Sequence, Seq[int] | DraftTree]]:
        return [(row, self._guess(row)) for row in rows]

    def should_hold_row(self, sequence: Sequence) -> bool:
        return self._waits

    def should_hold_step(self, waiting: Seq[Sequence], ready: Seq[Sequence], plain: int) -> bool:
        assert waiting
        assert not any(row.placeholders for row in (*waiting, *ready))
        return self._random.random() < self._holds

    def record_verified(self, outcome: AcceptedTokens) -> None:
        self.took.append((len(outcome.drafts), outcome.accepted))

    def finish(self, sequence: Sequence) -> None:
        pass

    def learn(self, answer: Any) -> None:
        pass

    def record_step(self, sample: StepSample) -> StepSample:
        return sample


def remembered(ran: Ran, right: float, seed: int, most: int = 5) -> Guess:
    """Return a draft source that knows another run's answers.

    Args:
        right: probability that a proposed token is right.
        most: maximum number of draft tokens.
    """
    rng = random.Random(seed)

    def guess(sequence: Sequence) -> list[int]:
        whole = ran.completions[sequence.request.key].tokens.token_ids.tolist()
        own = whole[sequence.output_length :][: rng.randrange(most + 1)]
        return [token if rng.random() < right else rng.randrange(VOCAB) for token in own]

    return guess


def branching(ran: Ran, right: float, seed: int, most: int = 9) -> Callable[[Sequence], DraftTree]:
    """Return a source of draft trees that knows another run's answers.

    Args:
        right: probability that a node on the answer's path gets the answer's token.
        most: maximum number of nodes.
    """
    rng = random.Random(seed)

    def guess(sequence: Sequence) -> DraftTree:
        whole = ran.completions[sequence.request.key].tokens.token_ids.tolist()
        own = whole[sequence.output_length :]
        tokens, parents, true = list[int](), list[int](), {-1: 0}  # nodes of the answer, and their depths
        for at in range(rng.randrange(most + 1)):
            parent = rng.choice([-1, *range(at), *true, *true])
            beside = {tokens[one] for one, other in enumerate(parents) if other == parent}
            depth = true.get(parent, len(own))
            token = own[depth] if depth < len(own) and rng.random() < right else rng.randrange(VOCAB)
            if token in beside:
                token = next(token for token in range(99) if token not in beside)
            if depth < len(own) and token == own[depth]:
                true[at] = depth + 1
            tokens.append(token)
            parents.append(parent)
        return DraftTree(tokens, parents)

    return guess


def assert_unchanged(got: Ran, wanted: Ran, forcing: Ran) -> None:
    """Assert that drafts change no answer, count each token once, and keep the number of forced tokens."""
    assert got.answers == wanted.answers
    assert got.logprobs == wanted.logprobs
    given = sum(len(c.tokens.token_ids) for c in got.completions.values())
    given += sum(
        c.error is not None and c.error.code in ("nan_logits", "no_token_left")
        for c in got.completions.values()
    )
    forced = sum(sample.forced_tokens for sample in got.requests.values())
    assert got.total("sampled_tokens") + forced == given
    steered, expected = (
        {key: (sample.steered, sample.forced_tokens) for key, sample in ran.requests.items()}
        for ran in (got, forcing)
    )
    assert steered == expected
