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
    """The state of a sequence between its arrival and its end.

    Attributes:
        WAITING: It is in the queue, for the first time or after a preemption, and has no blocks.
        RUNNING: It can be scheduled in the next step.
        AWAITING_TOKENS: It is not scheduled until the tokens of the step in flight are known.
        FINISHING: It has ended, but a step in flight still reads its blocks.
        FINISHED: It has ended, and its blocks are free.
    """

    WAITING = auto()
    RUNNING = auto()
    AWAITING_TOKENS = auto()
    FINISHING = auto()
    FINISHED = auto()


_AWAITING = SequenceStatus.AWAITING_TOKENS


@dataclass(slots=True, eq=False)
class CollectedLogprobs:
    """Collects the log-probabilities of a sequence's output tokens, and of the most likely tokens at each position."""

    _chosen: array[float] = field(default_factory=lambda: array("f"))
    _top: array[float] = field(default_factory=lambda: array("f"))
    _top_ids: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self._chosen)

    def append(self, found: TokenLogprobs, at: int) -> None:
        """Append a copy of the log-probabilities of one token.

        Args:
            found: The log-probabilities of several tokens.
            at: The index of the token in `found`.
        """
        self._chosen.append(found.chosen[at])
        self._top.frombytes(found.top[at].tobytes())
        self._top_ids.frombytes(found.top_ids[at].tobytes())

    def all(self) -> TokenLogprobs:
        """Return the log-probabilities of all tokens that were appended, as arrays."""
        count = len(self._chosen)
        shape = (count, len(self._top) // max(count, 1))
        return TokenLogprobs(
            np.array(self._chosen, np.float32),
            np.array(self._top, np.float32).reshape(shape),
            np.array(self._top_ids, np.int32).reshape(shape),
        )


@dataclass(slots=True)
class Masking:
    """Records whether the token mask of a constraint changed the tokens of a sequence.

    Attributes:
        followed: True if the last token would have been the same without the mask.
        ever_steered: True if the mask excluded the most likely token of any position.
    """

    followed: bool = True
    ever_steered: bool = False

    def note(self, barred: bool) -> None:
        """Record whether the mask changed the newest token.

        Args:
            barred: True if the mask excluded the most likely token.
        """
        self.followed, self.ever_steered = not barred, self.ever_steered or barred


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of a request in an engine. Fields are grouped by the class that writes them.

    Optional fields are None if the request does not ask for them.

    Attributes:
        request: The request.
        prompt_length: The number of prompt tokens.
        max_length: The maximum number of tokens, prompt and output together.
        stop_stream: Searches the output for stop strings.
        stop_token_ids: The tokens that end the answer.
        plain_greedy: True if each token is the argmax of the logits, except for a mask.
        steady: True if sampling does not depend on earlier tokens, and nothing but tokens is returned.
        pooling: How hidden states are pooled to the vector that is returned instead of tokens.
        scored: The continuations that the sequence scores instead of generating tokens.
        content_root: A digest of everything, except token ids, on which the keys and values depend.
        rope_offset: The row of the rotary tables for the first position.
        classified: True if the returned vector is the output of the classification head.
        second_segment: The position of the first token of type 1, or 0 if all tokens have type 0.
        tokens: The prompt, then the output, then drafts.
        logprobs: The log-probabilities of the output tokens.
        prompt_scores: The log-probabilities of the prompt tokens.
        loops: Detects repetitions. None: repetitions do not end the answer.
        bad: The token sequences that the answer must not contain.
        watched: True if a new token needs more checks than for stop tokens and for the maximum length.
        queued_s: When the request was queued. All times are in seconds since the engine's start.
        scheduled_s: When the first step of the sequence began. None: it has not begun.
        first_token_s: When the step ended that sampled the first token. None: it has not ended.
        constraint: The state of the constraint.
        mask: The number by which step plans refer to the constraint's token mask.
        needs_sync: True if the sequence must not be scheduled again before its newest tokens are known.
        placeholders: The number of tokens at the end of `tokens` whose values only the device knows.
        pooled: The hidden state for the returned vector: the sum so far, or the state of the last token.
        drafts: The number of tokens at the end of `tokens` that are drafts, which the next step verifies.
        draft_parents: The index of each draft's parent among the drafts, or -1; empty for a chain.
        drafting: True if the sequence waits for the tokens of its next step, because it has drafts or will get some.
        draft_masks: With a constraint, the number of the token mask after each draft.
        jump_forward_tokens: The number of output tokens that a constraint forced, so they were not sampled.
        status: The state. The Engine also changes it between RUNNING and AWAITING_TOKENS.
        arrival: The number in the order of arrival, which a preemption does not change.
        computed: The number of leading tokens whose keys and values are in the cache.
        computed_before_preemption: The maximum of `computed` before a preemption; these tokens are recomputed.
        reserved: The number of leading blocks whose contents are reserved while the sequence waits.
        cached_tokens: The number of prompt tokens that were found in the prefix cache.
        preemptions: The number of times that the sequence was preempted.
        tables: The block table of each cache group: blocks in the order of the tokens. Empty while the sequence waits.
        freed: The number of leading entries of each block table that are freed. Empty while the sequence waits.
        masking: Whether the constraint's mask changed the tokens.
        hashes: A cache of the content hashes of the first full prompt blocks.
    """

    # Fixed at creation
    request: Request
    prompt_length: int
    max_length: int
    stop_stream: StopStream | None
    stop_token_ids: frozenset[int]
    plain_greedy: bool
    steady: bool
    pooling: Pooling | None
    scored: ScoredBranch | None
    content_root: bytes
    rope_offset: int
    classified: bool
    second_segment: int

    # Written by the Engine
    tokens: array[int]
    logprobs: CollectedLogprobs | None
    prompt_scores: PromptScores | None
    loops: LoopDetector | None
    bad: BadTokens | None
    watched: bool
    queued_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    constraint: Constraint | None = None
    mask: int | None = None
    needs_sync: bool = False
    placeholders: int = 0
    pooled: States | None = None
    drafts: int = 0
    draft_parents: list[int] = field(default_factory=list)
    drafting: bool = False
    draft_masks: list[int] = field(default_factory=list)
    jump_forward_tokens: int = 0

    # Written by the Scheduler
    status: SequenceStatus = SequenceStatus.WAITING
    arrival: int = 0
    computed: int = 0
    computed_before_preemption: int = 0
    reserved: int = 0
    cached_tokens: int = 0
    preemptions: int = 0

    # Written by BlockTables
    tables: list[list[int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)

    # Written by the Engine from the results of the runner
    masking: Masking = field(default_factory=Masking)

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
            roots: The maximum length of a sequence, and the start values of content hashes.
            stop_stream: Searches the output for stop strings. None: the request has none.
            now: The current time in seconds since the engine's start.
            eos_token_ids: The end-of-sequence tokens of the model.
            scored: The path through the trie of continuations that the sequence scores. None: it scores none.
        """
        params, prompt = request.params, array("i", request.prompt.tobytes())
        logprobs = CollectedLogprobs() if params.asks_logprobs else None
        reshaped = params.has_penalty or params.min_tokens > 0 or params.logit_bias or params.forbids_tokens
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
        """True if only `max_length` can end the sequence, so its final length is known."""
        return self.request.params.has_known_length

    @property
    def looks_back(self) -> bool:
        """True if bad words make the next banned tokens depend on earlier tokens, which the host must know then."""
        return self.bad is not None and self.bad.looks_back

    @property
    def begins_request(self) -> bool:
        """True for the first sequence of a request. A request that scores continuations may run several sequences."""
        return self.scored is None or self.scored.is_first

    @property
    def most_cached(self) -> int:
        """The maximum number of leading tokens that may be taken from the prefix cache.

        Later tokens must run, because their logits or hidden states are needed.
        """
        last = len(self.tokens) - 1
        if self.pooling not in (None, "last"):  # needs hidden states of earlier tokens, which are not cached
            return 0
        if self.prompt_scores is not None and not self.prompt_scores.complete:
            return 0
        return last if self.scored is None else min(self.scored.branch.first, last)

    @property
    def remaining(self) -> int:
        """The number of tokens, without drafts, that must run before the next token can be sampled."""
        return len(self.tokens) - self.drafts - self.computed

    @property
    def output_length(self) -> int:
        """The number of tokens after the prompt. Drafts and tokens that only the device knows are included."""
        return len(self.tokens) - self.prompt_length

    @property
    def known_length(self) -> int:
        """The number of leading tokens whose values the host knows, without drafts."""
        return len(self.tokens) - self.placeholders - self.drafts

    def append_token(self, token: int) -> None:
        """Add the next token. It replaces the first placeholder, or is appended if there are no placeholders.

        A placeholder is a token whose value only the device knew so far.
        """
        if self.placeholders:
            self.tokens[-self.placeholders] = token
            self.placeholders -= 1
        else:
            self.tokens.append(token)

    def append_unwatched(self, token: int, now: float) -> FinishReason | None:
        """Add the next token to a sequence without drafts that only a stop token or the maximum length can end.

        Args:
            token: The token. It replaces the first placeholder, if there is any.
            now: The current time in seconds since the engine's start.

        Returns:
            Why the sequence ends with this token, or None if it continues.
        """
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
        """Replace the first placeholders by the tokens of a multi-step launch.

        Only a stop token or the maximum length may end the sequence. A placeholder is a token whose value only the
        device knew so far.

        Args:
            tokens: The tokens of consecutive steps.
            now: The current time in seconds since the engine's start.

        Returns:
            False if a token is missing or is a stop token. In this case nothing is changed.
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
        """Add the hidden states of a chunk to the pooled hidden state of the sequence.

        Args:
            start: The position of the chunk's first token. At 0, pooling starts again, as after a preemption.
            states: [1, hidden], the state of one token, or the sum over the chunk's tokens.
        """
        if self.pooled is None or start == 0 or self.pooling != "mean":
            self.pooled = states.copy()
            return
        # Sums of infinities are not numbers; `vector` checks that
        with np.errstate(invalid="ignore"):
            self.pooled = self.pooled + states

    @property
    def vector(self) -> Vector | None:
        """The pooled hidden state of the prompt, or the logits of the classification head, as float32.

        It is None until it is computed, and if a value is not finite.
        """
        if self.pooled is None:
            return None
        parts = self.prompt_length if self.pooling == "mean" and not self.classified else 1
        values = (self.pooled[0] / parts).astype(np.float32)
        return Vector(values) if np.isfinite(values).all() else None

    def mark_tokens_known(self) -> None:
        """End the state AWAITING_TOKENS if the host knows all tokens now, so the sequence can be scheduled again."""
        if self.status is _AWAITING and not self.placeholders:
            self.status = SequenceStatus.RUNNING

    def ends_with(self, token: int) -> FinishReason | None:
        """Return why the newest known token ends the sequence, or None if the sequence continues.

        It must be called once per token if repetitions can end the sequence.

        Args:
            token: The newest token, which the sequence contains already.
        """
        length = self.known_length
        looped = self.loops is not None and self.loops.closes(self.tokens, length)
        if (looped or token in self.stop_token_ids) and self._may_end(length):
            return "stop" if token in self.stop_token_ids else "repetition"
        return "length" if length >= self.max_length else None

    def _may_end(self, length: int) -> bool:
        return length - self.prompt_length >= self.request.params.min_tokens

    def drop_first_placeholder(self) -> None:
        """Remove the first placeholder, because the step sampled no token. Without placeholders, nothing is done."""
        if self.placeholders:
            del self.tokens[-self.placeholders]
            self.placeholders -= 1

    def drop_placeholders(self, count: int | None = None) -> None:
        """Remove placeholders from the end, because the answer has ended before them.

        A placeholder is a token whose value only the device knows.

        Args:
            count: The number of placeholders to remove. None: all.
        """
        count = self.placeholders if count is None else count
        if count:
            del self.tokens[-count:]
            self.placeholders -= count

    def propose(self, tokens: Iterable[int], parents: Iterable[int] = ()) -> None:
        """Append draft tokens, which the next step verifies.

        Args:
            tokens: The draft tokens.
            parents: For a draft tree, the index of each draft's parent, or -1 for the sequence's last token. Empty for
                a chain.
        """
        assert not self.placeholders, "its last tokens are not known"
        assert self.status is not _AWAITING, "a step in flight runs it"
        assert not self.drafts, "it has drafts already"
        before = len(self.tokens)
        self.tokens.extend(tokens)
        self.drafts = len(self.tokens) - before
        self.draft_parents = compact_parents([*parents])

    def drop_drafts(self, keep: int = 0) -> None:
        """Remove all drafts except the first `keep` drafts."""
        if self.drafts > keep:
            del self.tokens[keep - self.drafts :]
            self.drafts = keep
            self.draft_parents = compact_parents(self.draft_parents[:keep])

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Return the content hash of a full prompt block: a digest of all tokens up to the end of the block.

        Args:
            index: The index of the block.
            block_size: The number of tokens per block.
        """
        while len(self.hashes) <= index:
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else self.content_root
            piece = self.tokens[start : start + block_size].tobytes()
            self.hashes.append(blake2b(parent + piece, digest_size=16).digest())
        return self.hashes[index]

    def content(self, index: int, block_size: int) -> bytes:
        """Return the content hash of a prompt block, which may be the partial block at the end of the prompt.

        Args:
            index: The index of the block.
            block_size: The number of tokens per block.
        """
        start = index * block_size
        if start + block_size <= self.prompt_length:
            return self.block_hash(index, block_size)
        parent = self.block_hash(index - 1, block_size) if index else self.content_root
        return blake2b(parent + self.tokens[start : self.prompt_length].tobytes(), digest_size=16).digest()

    def block_hashes(self, count: int, block_size: int) -> list[bytes]:
        """Return the content hashes of the first `count` blocks. These blocks must be full of prompt tokens.

        Args:
            count: The number of blocks.
            block_size: The number of tokens per block.
        """
        if count:
            self.block_hash(count - 1, block_size)
        return self.hashes[:count]

    def prompt_blocks(self, tokens: int, block_size: int) -> int:
        """Return the number of blocks that are full of prompt tokens, within the first `tokens` tokens.

        Args:
            tokens: The number of leading tokens to consider.
            block_size: The number of tokens per block.
        """
        return min(tokens, self.prompt_length) // block_size
