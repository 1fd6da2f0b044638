"""A runner without a model, which gives sequences any number of tokens and knows what every cache slot holds."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchinfer.core.request import Request, TokenLogprobs
from batchinfer.core.samples import StepSample
from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.runner.model_runner import RunnerOutput
from batchinfer.engine.schedule.draft_tree import DraftTree
from batchinfer.engine.schedule.scheduler import Scheduler, Step
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_plan import COMPUTES, StepPlan
from batchinfer_kernels.sample import NO_TOKEN
from tests.batchinfer.engine.driver import Slots
from tests.batchinfer.engine.hashing_model import SHAPE
from tests.batchinfer.engine.small_engine import Ran, layer_each

VOCAB = 9


def next_token(tokens: Seq[int], nan_every: int = 0) -> int:
    """Made of all tokens before it."""
    mixed = random.Random(str(list(tokens))).getrandbits(32)
    return NO_TOKEN if nan_every and mixed % nan_every == 0 else mixed % VOCAB


Guess = Callable[[Sequence], Seq[int] | DraftTree]


class Drafts:
    """Proposes what `guess` says, for every row, whatever it costs."""

    def __init__(self, guess: Guess, waits: bool = True, holds: float = 0.0) -> None:
        self._guess, self._waits = guess, waits
        self._holds, self._random = holds, random.Random(0)
        self.took: list[tuple[int, int]] = []  # drafts, and how many of them were right

    def propose(
        self, rows: Seq[Sequence], ahead: int, others: int
    ) -> Iterable[tuple[Sequence, Seq[int] | DraftTree]]:
        return [(row, self._guess(row)) for row in rows]

    def waits(self, sequence: Sequence) -> bool:
        return self._waits

    def holds(self, waiting: Seq[Sequence], ready: Seq[Sequence], plain: int) -> bool:
        assert waiting
        assert not any(row.placeholders for row in (*waiting, *ready))
        return self._random.random() < self._holds

    def verified(self, taken: AcceptedTokens) -> None:
        self.took.append((len(taken.drafts), taken.right))

    def ended(self, sequence: Sequence) -> None:
        pass

    def learn(self, answer: Any) -> None:
        pass

    def stepped(self, sample: StepSample) -> StepSample:
        return sample


def remembered(ran: Ran, right: float, seed: int, most: int = 5) -> Guess:
    """Propose up to `most` tokens of the answers of another run, of which a share is right."""
    rng = random.Random(seed)

    def guess(sequence: Sequence) -> list[int]:
        whole = ran.completions[sequence.request.key].tokens.token_ids.tolist()
        own = whole[sequence.output_length :][: rng.randrange(most + 1)]
        return [token if rng.random() < right else rng.randrange(VOCAB) for token in own]

    return guess


def branching(ran: Ran, right: float, seed: int, most: int = 9) -> Callable[[Sequence], DraftTree]:
    """Propose trees of up to `most` tokens. Of those that stand where the answers of another run have a token, a share
    is that."""
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
    """Rows with drafts have the answers of those without, each token counted once, and as many that a constraint chose
    as where it forces tokens without drafts."""
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


@dataclass
class Speculating:
    """Verifies drafts, gives none or several tokens where it may, and looks ahead or not."""

    looks_ahead: bool = False
    block_size: int = 4
    nan_every: int = 0
    barriers: Callable[[Request], bool] = lambda _: False
    random: random.Random | None = None  # None: as many tokens as drafts are right, and one more
    most_tokens: None = None
    windows: tuple[int | None, ...] = (None,)  # of cache groups
    model: Callable[[Seq[int], int], int] = next_token
    cost: Any = SHAPE
    ran: int = 0  # positions
    accepted: int = 0
    rejected: int = 0
    counts: list[int] = field(default_factory=list)  # tokens given at once
    _slots: Slots | None = None
    _tokens: dict[bytes, list[int]] = field(default_factory=dict)  # prompt and all that was given

    scheduled: Step = field(default_factory=Step)
    wants = COMPUTES

    @property
    def layout(self) -> CacheLayout:
        return layer_each(self.windows, self.block_size)

    def shown(self, kind: type[Scheduler]) -> type[Scheduler]:
        """A scheduler that shows this runner what it chose, and has rows wait for their tokens that it wants to."""
        runner = self

        class Shown(kind):  # type: ignore[misc,valid-type]
            def add(self, sequence: Sequence) -> None:
                sequence.needs_sync |= runner.barriers(sequence.request)
                super().add(sequence)

            def schedule(self, drafted: bool = False) -> Step:
                runner.scheduled = super().schedule(drafted)
                return runner.scheduled

        return Shown

    def launch(self, plan: StepPlan) -> RunnerOutput:
        chunks, copies = self.scheduled.chunks, self.scheduled.copies
        assert plan.starts.tolist() == [chunk.start for chunk in chunks]
        if self._slots is None:
            self._slots = Slots(self.windows, self.block_size)
        self._slots.run(chunks, copies, self._content)
        self.ran += sum(c.length for c in chunks)
        sampling = [c.sequence for c in chunks if c.samples]
        tokens = [self._next(sequence) for sequence in sampling]
        asked = {
            place: self._logprobs(sequence, len(given))
            for place, (sequence, given) in enumerate(zip(sampling, tokens, strict=True))
            if sequence.request.params.logprobs is not None
        }
        return RunnerOutput(tokens, 0, asked)

    def _logprobs(self, sequence: Sequence, given: int) -> TokenLogprobs:
        """Of the last tokens given, made of all tokens up to each."""
        known = self._tokens[sequence.request.key]
        ends = range(len(known) - given + 1, len(known) + 1)
        chosen = [-float(zlib.crc32(str(known[:end]).encode()) % 1000) for end in ends]
        top = np.array(chosen, np.float32)[:, None] + [[0, 1]]
        return TokenLogprobs(np.array(chosen, np.float32), top.astype(np.float32), top.astype(np.int32))

    def _content(self, sequence: Sequence) -> list[int]:
        """Its tokens with their values, some of which the engine may not know, and its drafts."""
        known = self._tokens.setdefault(sequence.request.key, sequence.request.prompt.tolist())
        assert sequence.tokens[: sequence.known_length].tolist() == known[: sequence.known_length]
        return known + sequence.tokens[len(sequence) - sequence.drafts :].tolist()

    def _next(self, sequence: Sequence) -> list[int]:
        known = self._tokens[sequence.request.key]
        given = [self.model(known, self.nan_every)]
        for draft in sequence.tokens[len(sequence) - sequence.drafts :]:
            if given[-1] != draft or (self.random and self.random.random() < 0.2):
                break
            given.append(self.model(known + given, self.nan_every))
        self.accepted += len(given) - 1
        self.rejected += sequence.drafts - len(given) + 1
        if self.random and (sequence.needs_sync or sequence.drafting or not self.looks_ahead):
            given = self._changed(known, given)
        known += given
        self.counts.append(len(given))
        return given

    def _changed(self, known: list[int], given: list[int]) -> list[int]:
        """None, fewer, or further ones that were not proposed."""
        assert self.random
        kind = self.random.random()
        if kind < 0.25:
            return given[: self.random.randrange(len(given) + 1)]
        while kind > 0.7 and len(given) < 5:
            given = [*given, self.model(known + given, self.nan_every)]
        return given
