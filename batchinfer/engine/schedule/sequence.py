"""A request that the engine is working on: its tokens, blocks and state."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from batchinfer.core.request import FinishReason, Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.schedule.collected_logprobs import CollectedLogprobs
from batchinfer.engine.schedule.constraints import Constraint

# Fed the output token ids one by one, says how many characters of their text to keep once a stop string appeared.
StopStream = Callable[[int], int | None]
# Makes one for parameters that have stop strings.
StopStreams = Callable[[SamplingParams], StopStream]


_ROTATED_LATER = b"rotated from a later row"


@dataclass(slots=True, eq=False)
class SharedPart:
    """What several sequences have in common behind their last common whole block: the first `tokens` tokens of their
    blocks `index`. `content`: of the block from which they take it over; `turns`: of those that wait to do so."""

    content: bytes
    index: int
    tokens: int
    turns: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sequence:
    """Token ids, block table and state of one request. Owned by the scheduler; plain ints only."""

    request: Request
    tokens: array[int]  # prompt, then output
    prompt_length: int
    max_length: int  # prompt and output together may not grow beyond this
    stop_stream: StopStream | None = None
    constraint: Constraint | None = None  # what its answer has to follow
    logprobs: CollectedLogprobs | None = None  # of its output tokens; None: the request does not ask for them
    stops: frozenset[int] = frozenset()  # tokens that end it
    watched: bool = False  # whether a token has to be looked at for more than `stops` and its length
    argmax_alone: bool = False  # whether nothing but a mask ever gives it another token than the argmax
    rotated_from: int = 0  # the row of the rotary tables at which its positions begin
    computed: int = 0  # tokens whose K and V are in the cache
    pending: int = 0  # how many of its last tokens are placeholders, whose values are still on the device
    drafts: int = 0  # how many of its last tokens are proposals, which the next step that runs it verifies
    barrier: bool = False  # no step looks ahead of its tokens: a step may give it none or several
    blocked: bool = False  # an in-flight step will give it tokens; it is not scheduled until they are known
    high_water: int = 0  # most tokens that were computed before a preemption: so many again are recomputation
    tables: list[list[int]] = field(
        default_factory=list
    )  # of each cache group: blocks by position; none, if it waits
    left: list[int] = field(
        default_factory=list
    )  # of each cache group: so many leading entries are free again
    hashes: list[bytes] = field(default_factory=list)  # of the prompt's full blocks, as far as asked for
    turn: int = 0  # place in the order of admission, kept over a preemption
    reserved: int = 0  # while it waits: how many of its first blocks' contents are kept for it
    part: SharedPart | None = None  # what it takes over behind whole blocks, if that is there
    obeys: bool = True  # whether its last token would have been the same without its constraint
    steered: bool = False  # whether its constraint ever kept it from its most likely token
    forced: int = 0  # output tokens that had to come and were not sampled
    cached_tokens: int = 0  # prompt tokens taken from a shared prefix instead of being run
    preemptions: int = 0
    queued_s: float = 0.0
    scheduled_s: float | None = None
    first_token_s: float | None = None

    @classmethod
    def of(
        cls,
        request: Request,
        max_model_len: int,
        stop_stream: StopStream | None,
        now: float,
        long_from: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> Sequence:
        """A sequence that may become longer than `long_from` is rotated in the way that begins at `max_model_len`: what
        it may become is part of the row, so that its answer does not depend on other rows."""
        tokens = array("i", request.prompt.tobytes())
        longest = min(max_model_len, len(tokens) + request.params.max_tokens)
        first = max_model_len if long_from is not None and longest > long_from else 0
        params = request.params
        made = cls(request, tokens, len(tokens), longest, stop_stream, queued_s=now)
        made.logprobs, made.rotated_from = None if params.logprobs is None else CollectedLogprobs(), first
        made.stops = (frozenset() if params.ignore_eos else eos_token_ids).union(params.stop_token_ids)
        made.watched = stop_stream is not None or made.logprobs is not None
        free = not (params.penalised or params.min_tokens)
        made.argmax_alone = params.greedy and made.logprobs is None and free
        return made

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def exact(self) -> bool:
        """Whether nothing but max_length can end it."""
        return self.request.params.has_known_length

    @property
    def remaining(self) -> int:
        """Tokens still to run before the next one can be sampled, drafts not included."""
        return len(self.tokens) - self.drafts - self.computed

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def known_length(self) -> int:
        """Tokens whose values are certain."""
        return len(self.tokens) - self.pending - self.drafts

    def take(self, token: int) -> None:
        """Append the next token, or put it in the place of the first placeholder."""
        if self.pending:
            self.tokens[-self.pending] = token
            self.pending -= 1
        else:
            self.tokens.append(token)

    def take_unwatched(self, token: int, now: float) -> FinishReason | None:
        """Append the next token of a sequence that is not watched and has no drafts; why it ends, if it does."""
        tokens, pending = self.tokens, self.pending
        if pending:
            tokens[-pending] = token
            self.pending = pending = pending - 1
        else:
            tokens.append(token)
        self.blocked = False
        if self.first_token_s is None:
            self.first_token_s = now
        if token in self.stops or len(tokens) - pending >= self.max_length:
            return self.ends_with(token)
        return None

    def ends_with(self, token: int) -> FinishReason | None:
        """Why the sequence ends with its newest known token, if it does."""
        length = len(self.tokens) - self.pending - self.drafts
        if token in self.stops and length - self.prompt_length >= self.request.params.min_tokens:
            return "stop"
        return "length" if length >= self.max_length else None

    def take_none(self) -> None:
        """Remove the first placeholder: its step gave no token."""
        if self.pending:
            del self.tokens[-self.pending]
            self.pending -= 1

    def forget_pending(self) -> None:
        """Remove all placeholders, because the sequence has ended."""
        if self.pending:
            del self.tokens[-self.pending :]
            self.pending = 0

    def propose(self, tokens: Iterable[int]) -> None:
        """Append drafts: the next step runs them, too, and its tokens say how many of them were right."""
        assert self.barrier, "a step may look ahead of its tokens"
        assert not self.pending, "its last tokens are not known"
        assert not self.blocked, "a step runs it"
        before = len(self.tokens)
        self.tokens.extend(tokens)
        self.drafts += len(self.tokens) - before

    def drop_drafts(self, keep: int = 0) -> None:
        """Remove the drafts behind the first `keep`."""
        if self.drafts > keep:
            del self.tokens[keep - self.drafts :]
            self.drafts = keep

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Digest of the first (index + 1) × block_size prompt tokens: each block hashes its parent's digest, the first
        how the sequence is rotated."""
        while len(self.hashes) <= index:
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else self._root
            piece = self.tokens[start : start + block_size].tobytes()
            self.hashes.append(blake2b(parent + piece, digest_size=16).digest())
        return self.hashes[index]

    def content(self, index: int, block_size: int) -> bytes:
        """The same for any block that holds prompt: of the last one, if it is not full, what it holds of the prompt."""
        start = index * block_size
        if start + block_size <= self.prompt_length:
            return self.block_hash(index, block_size)
        parent = self.block_hash(index - 1, block_size) if index else self._root
        return blake2b(parent + self.tokens[start : self.prompt_length].tobytes(), digest_size=16).digest()

    @property
    def _root(self) -> bytes:
        """The parent of the first block."""
        return _ROTATED_LATER if self.rotated_from else b""

    def block_hashes(self, count: int, block_size: int) -> list[bytes]:
        """Digests of the first `count` blocks, which must be full of prompt."""
        if count:
            self.block_hash(count - 1, block_size)
        return self.hashes[:count]

    def prompt_blocks(self, tokens: int, block_size: int) -> int:
        """How many full blocks of prompt lie within the first `tokens` tokens."""
        return min(tokens, self.prompt_length) // block_size
