"""The state of a request in an engine: tokens, blocks and progress."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b

import numpy as np

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import FinishReason, Request, TokenLogprobs, Vector
from batchinfer.core.sampling import Pooling, SamplingParams
from batchinfer.engine.schedule.constraints import Constraint
from batchinfer.engine.schedule.draft_tree import compact_parents
from batchinfer.engine.schedule.loops import LoopDetector
from batchinfer.engine.schedule.scored_branches import PromptScores, ScoredBranch
from batchinfer.engine.schedule.step_plan import States
from batchinfer.engine.schedule.token_edits import BadTokens, bad_tokens
from batchinfer_kernels.arithmetic import NO_TOKEN

# Called with each output token. Returns the number of characters to keep once a stop string has appeared, else None
StopStream = Callable[[int], int | None]
# Creates a StopStream for parameters with stop strings
StopStreams = Callable[[SamplingParams], StopStream]


class SequenceStatus(Enum):
    """The state of a sequence between its arrival and its end."""

    WAITING = auto()  # queued, for the first time or after a preemption; without blocks
    RUNNING = auto()  # can be scheduled
    AWAITING_TOKENS = auto()  # not scheduled until the tokens of the step in flight are known
    FINISHING = auto()  # ended, but a step in flight still reads its blocks
    FINISHED = auto()  # ended, and its blocks are free


_AWAITING = SequenceStatus.AWAITING_TOKENS


@dataclass(slots=True, eq=False)
class CollectedLogprobs:
    """The log-probabilities of a sequence's tokens: 4 bytes per token, and 8 bytes per top token."""

    _chosen: array[float] = field(default_factory=lambda: array("f"))
    _top: array[float] = field(default_factory=lambda: array("f"))
    _top_ids: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self._chosen)

    def append(self, found: TokenLogprobs, at: int) -> None:
        """Append entry `at` of `found`. The values are copied, because `found` may be a view of a step's results."""
        self._chosen.append(found.chosen[at])
        self._top.frombytes(found.top[at].tobytes())
        self._top_ids.frombytes(found.top_ids[at].tobytes())

    def all(self) -> TokenLogprobs:
        """Return the log-probabilities of all tokens so far."""
        count = len(self._chosen)
        shape = (count, len(self._top) // max(count, 1))
        return TokenLogprobs(
            np.array(self._chosen, np.float32),
            np.array(self._top, np.float32).reshape(shape),
            np.array(self._top_ids, np.int32).reshape(shape),
        )


@dataclass(slots=True)
class Masking:
    """Records whether the mask of a row changed its tokens."""

    followed: bool = True  # True if the last token would have been the same without the mask
    ever_steered: bool = False  # True if the mask ever excluded the row's most likely token

    def note(self, barred: bool) -> None:
        """Record the newest token. `barred`: the mask excluded the row's most likely token."""
        self.followed, self.ever_steered = not barred, self.ever_steered or barred


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of a request in an engine. Fields are grouped by the class that writes them."""

    # Fixed at creation
    request: Request
    prompt_length: int
    max_length: int  # maximum length of prompt and output together, in tokens
    stop_stream: StopStream | None
    stop_token_ids: frozenset[int]  # tokens that end the answer
    plain_greedy: bool  # True if each token is the argmax of the logits, except for a mask
    steady: bool  # True if sampling does not depend on earlier tokens and only tokens are returned
    pooling: Pooling | None  # pooling of the vector that the sequence returns instead of tokens, if any
    # The continuations that the sequence scores instead of generating tokens, if any
    scored: ScoredBranch | None
    content_root: bytes  # digest of everything except token ids that its K and V depend on
    rope_offset: int  # row of the rotary tables for its first position
    classified: bool  # True if its vector is the output of the classification head
    second_segment: int  # first token of type 1; 0: there is none

    # Written by the Engine
    tokens: array[int]  # the prompt, then the output, then drafts
    logprobs: CollectedLogprobs | None  # of the output tokens, if requested
    prompt_scores: PromptScores | None  # log-probabilities of the prompt, if requested
    loops: LoopDetector | None  # None: repetitions do not end the answer
    bad: BadTokens | None  # token sequences that the answer must not contain, if any
    watched: bool  # True if each token needs more checks than `stop_token_ids` and the length
    queued_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    constraint: Constraint | None = None
    mask: int | None = None  # number of its mask in step plans
    needs_sync: bool = False  # True if it must not be scheduled again before its newest tokens are known
    placeholders: int = 0  # number of last tokens whose values only the device knows
    pooled: States | None = None  # sum of its hidden states so far, or the last one, for its vector
    drafts: int = 0  # number of last tokens that are drafts, which the next step verifies
    draft_parents: list[int] = field(default_factory=list)  # see DraftTree; empty for a chain
    drafting: bool = False  # True if, because of drafts, it waits for the tokens of its next step
    # Number of the mask after each draft, with a constraint
    draft_masks: list[int] = field(default_factory=list)
    jump_forward_tokens: int = 0  # output tokens that were forced and not sampled

    # Written by the Scheduler. The Engine changes `status` between RUNNING and AWAITING_TOKENS
    status: SequenceStatus = SequenceStatus.WAITING
    arrival: int = 0  # order of arrival, unchanged by a preemption
    computed: int = 0  # leading tokens whose K and V are in the cache
    # Maximum of `computed` before a preemption; these tokens are recomputed
    computed_before_preemption: int = 0
    reserved: int = 0  # number of leading blocks that are reserved for it while it waits
    cached_tokens: int = 0  # prompt tokens taken from the cache
    preemptions: int = 0

    # Written by BlockTables: one element per cache group, empty while the sequence waits
    tables: list[list[int]] = field(default_factory=list)  # blocks in the order of the tokens
    freed: list[int] = field(default_factory=list)  # number of leading table entries that are freed

    # Written by the Engine from the results of the runner
    masking: Masking = field(default_factory=Masking)

    # A cache of the hashes of the prompt's first full blocks
    hashes: list[bytes] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        request: Request,
        roots: ContentRoots,
        stop_stream: StopStream | None,
        now: float,
        eos_token_ids: frozenset[int] = frozenset(),
        scored: ScoredBranch | None = None,
    ) -> Sequence:
        """Create the sequence of a request.

        Args:
            request: The request.
            roots: The position limit and content roots of the model.
            stop_stream: The function that searches for stop strings, if the request has any.
            now: The current time in seconds since the engine's start.
            eos_token_ids: The EOS tokens of the model.
            scored: The branch that the sequence scores, if any.
        """
        params, prompt = request.params, array("i", request.prompt.tobytes())
        logprobs = CollectedLogprobs() if params.asks_logprobs else None
        reshaped = params.penalised or params.min_tokens > 0 or params.logit_bias or params.forbids_tokens
        loops = LoopDetector(params.repetition_stop, len(prompt)) if params.repetition_stop else None
        return cls(
            request=request,
            prompt_length=len(prompt),
            max_length=roots.longest(len(prompt), params),
            stop_stream=stop_stream,
            stop_token_ids=(frozenset() if params.ignore_eos else eos_token_ids).union(params.stop_token_ids),
            pooling=params.pooling,
            scored=scored,
            plain_greedy=params.greedy and logprobs is None and not reshaped,
            steady=params.is_stateless,
            content_root=roots.of(len(prompt), params),
            rope_offset=roots.rope_offset(len(prompt), params),
            classified=params.classified,
            second_segment=params.second_segment,
            tokens=prompt,
            logprobs=logprobs,
            prompt_scores=None
            if (most := params.prompt_logprobs) is None
            else PromptScores(request.prompt, most),
            loops=loops,
            bad=bad_tokens(params.bad_tokens) if params.bad_tokens else None,
            watched=stop_stream is not None or logprobs is not None or loops is not None,
            queued_s=now,
        )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def exact(self) -> bool:
        """True if only max_length can end the sequence, so its length is known."""
        return self.request.params.has_known_length

    @property
    def looks_back(self) -> bool:
        """True if banned tokens depend on the tokens before, which must therefore be known."""
        return self.bad is not None and self.bad.looks_back

    @property
    def begins_request(self) -> bool:
        """True for the first sequence of a request."""
        return self.scored is None or self.scored.is_first

    @property
    def most_cached(self) -> int:
        """The maximum number of tokens taken from the cache. Later tokens must run because they produce output."""
        last = len(self.tokens) - 1
        if self.pooling not in (None, "last"):  # needs hidden states of earlier tokens, which are not cached
            return 0
        if self.prompt_scores is not None and not self.prompt_scores.complete:
            return 0
        return last if self.scored is None else min(self.scored.branch.first, last)

    @property
    def remaining(self) -> int:
        """The number of tokens to run before the next one can be sampled, without drafts."""
        return len(self.tokens) - self.drafts - self.computed

    @property
    def output_length(self) -> int:
        """The number of tokens after the prompt, placeholders and drafts included."""
        return len(self.tokens) - self.prompt_length

    @property
    def known_length(self) -> int:
        """The number of tokens without placeholders and drafts."""
        return len(self.tokens) - self.placeholders - self.drafts

    def append_token(self, token: int) -> None:
        """Append the next token, or replace the first placeholder."""
        if self.placeholders:
            self.tokens[-self.placeholders] = token
            self.placeholders -= 1
        else:
            self.tokens.append(token)

    def append_unwatched(self, token: int, now: float) -> FinishReason | None:
        """Append a token of a sequence that is not watched and has no drafts. Return the reason if it ends."""
        tokens, placeholders = self.tokens, self.placeholders
        if placeholders:
            tokens[-placeholders] = token
            self.placeholders = placeholders = placeholders - 1
        else:
            tokens.append(token)
            if self.status is _AWAITING:
                self.status = SequenceStatus.RUNNING
        if self.first_token_s is None:
            self.first_token_s = now
        if token in self.stop_token_ids or len(tokens) - placeholders >= self.max_length:
            return self.ends_with(token)
        return None

    def append_run(self, tokens: list[int], now: float) -> bool:
        """Replace placeholders of a sequence that is not watched by the tokens of a multi-step launch.

        Returns:
            False, without any change, if a token is missing or may end the answer.
        """
        if NO_TOKEN in tokens or not self.stop_token_ids.isdisjoint(tokens):
            return False
        first = len(self.tokens) - self.placeholders
        self.tokens[first : first + len(tokens)] = array("i", tokens)
        self.placeholders -= len(tokens)
        if self.first_token_s is None:
            self.first_token_s = now
        return True

    def pool(self, start: int, states: States) -> None:
        """Add the hidden states of a chunk to the vector.

        Args:
            start: The position of the chunk's first token. 0 resets a mean, as after a preemption.
            states: (1, hidden), the state of one token or the sum of the chunk's states.
        """
        if self.pooled is None or start == 0 or self.pooling != "mean":
            self.pooled = states.copy()
            return
        # Sums of infinities are not numbers; `vector` checks that
        with np.errstate(invalid="ignore"):
            self.pooled = self.pooled + states

    @property
    def vector(self) -> Vector | None:
        """The vector of the prompt, or the logits of the classification head; None if not computed or not finite."""
        if self.pooled is None:
            return None
        parts = self.prompt_length if self.pooling == "mean" and not self.classified else 1
        values = (self.pooled[0] / parts).astype(np.float32)
        return Vector(values) if np.isfinite(values).all() else None

    def mark_tokens_known(self) -> None:
        """Make the sequence schedulable if the host knows the tokens of all its steps."""
        if self.status is _AWAITING and not self.placeholders:
            self.status = SequenceStatus.RUNNING

    def ends_with(self, token: int) -> FinishReason | None:
        """Return the reason if the newest token ends the sequence, else None.

        Must be called once per token of a sequence that is watched.
        """
        length = self.known_length
        looped = self.loops is not None and self.loops.closes(self.tokens, length)
        if (looped or token in self.stop_token_ids) and self._may_end(length):
            return "stop" if token in self.stop_token_ids else "repetition"
        return "length" if length >= self.max_length else None

    def _may_end(self, length: int) -> bool:
        return length - self.prompt_length >= self.request.params.min_tokens

    def drop_first_placeholder(self) -> None:
        """Remove the first placeholder, because its step sampled no token."""
        if self.placeholders:
            del self.tokens[-self.placeholders]
            self.placeholders -= 1

    def drop_placeholders(self, count: int | None = None) -> None:
        """Remove `count` placeholders, or all if it is None, because the sequence has ended."""
        count = self.placeholders if count is None else count
        if count:
            del self.tokens[-count:]
            self.placeholders -= count

    def propose(self, tokens: Iterable[int], parents: Iterable[int] = ()) -> None:
        """Append draft tokens, which the next step verifies.

        Args:
            tokens: The draft tokens.
            parents: Their parents if they are a tree; see DraftTree.
        """
        assert not self.placeholders, "its last tokens are not known"
        assert self.status is not _AWAITING, "a step in flight runs it"
        assert not self.drafts, "it has drafts already"
        before = len(self.tokens)
        self.tokens.extend(tokens)
        self.drafts = len(self.tokens) - before
        self.draft_parents = compact_parents([*parents])

    def drop_drafts(self, keep: int = 0) -> None:
        """Remove the drafts after the first `keep`."""
        if self.drafts > keep:
            del self.tokens[keep - self.drafts :]
            self.drafts = keep
            self.draft_parents = compact_parents(self.draft_parents[:keep])

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Return the digest of the first (index + 1) * block_size prompt tokens, chained from the content root."""
        while len(self.hashes) <= index:
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else self.content_root
            piece = self.tokens[start : start + block_size].tobytes()
            self.hashes.append(blake2b(parent + piece, digest_size=16).digest())
        return self.hashes[index]

    def content(self, index: int, block_size: int) -> bytes:
        """Return the digest of the prompt up to the end of a block, which may be the partial block at its end."""
        start = index * block_size
        if start + block_size <= self.prompt_length:
            return self.block_hash(index, block_size)
        parent = self.block_hash(index - 1, block_size) if index else self.content_root
        return blake2b(parent + self.tokens[start : self.prompt_length].tobytes(), digest_size=16).digest()

    def block_hashes(self, count: int, block_size: int) -> list[bytes]:
        """Return the digests of the first `count` blocks, which must be full of prompt tokens."""
        if count:
            self.block_hash(count - 1, block_size)
        return self.hashes[:count]

    def prompt_blocks(self, tokens: int, block_size: int) -> int:
        """Return the number of full prompt blocks within the first `tokens` tokens."""
        return min(tokens, self.prompt_length) // block_size
