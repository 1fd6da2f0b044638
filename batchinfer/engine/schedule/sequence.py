"""The request in flight: its tokens, blocks and state."""

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
from batchinfer.engine.schedule.draft_tree import without_chain
from batchinfer.engine.schedule.loops import LoopDetector
from batchinfer.engine.schedule.scored_branches import PromptScores, ScoredBranch
from batchinfer.engine.schedule.step_plan import States
from batchinfer.engine.schedule.token_edits import BadTokens, bad_tokens
from batchinfer_kernels.arithmetic import NO_TOKEN

# Fed the output token ids one by one, says how many characters of their text to keep once a stop string appeared.
StopStream = Callable[[int], int | None]
# Makes one for parameters that have stop strings.
StopStreams = Callable[[SamplingParams], StopStream]


class SequenceStatus(Enum):
    """The state of a sequence between its arrival and its end."""

    WAITING = auto()  # queued, for the first time or after a preemption; it holds no blocks
    RUNNING = auto()  # each step may run it
    # An in-flight step will give it tokens; it is not scheduled until they are known
    AWAITING_TOKENS = auto()
    FINISHING = auto()  # it is not scheduled any more, but an in-flight step still reads its blocks
    FINISHED = auto()  # its blocks are free


_AWAITING = SequenceStatus.AWAITING_TOKENS


@dataclass(slots=True, eq=False)
class CollectedLogprobs:
    """The log-probabilities of a sequence's tokens. It takes 4 bytes a token, and 8 for each of the likeliest ones."""

    _chosen: array[float] = field(default_factory=lambda: array("f"))
    _top: array[float] = field(default_factory=lambda: array("f"))
    _top_ids: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self._chosen)

    def append(self, found: TokenLogprobs, at: int) -> None:
        """Copy the log-probabilities of the token `at` of `found`, which may be a view of a whole step's."""
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
    """The sampler's memory of a row's mask."""

    followed: bool = True  # whether the last token would have been the same without the mask
    ever_steered: bool = False  # whether the mask ever kept the row from its most likely token

    def note(self, barred: bool) -> None:
        """Remember whether the mask kept the row from its most likely token."""
        self.followed, self.ever_steered = not barred, self.ever_steered or barred


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in flight: its token ids, block tables and state. The fields are grouped by who writes them."""

    # Fixed when the sequence is made
    request: Request
    prompt_length: int
    max_length: int  # prompt and output together may not grow beyond this
    stop_stream: StopStream | None
    stop_token_ids: frozenset[int]  # tokens that end the answer
    plain_greedy: bool  # whether nothing but a mask ever gives it another token than the argmax
    steady: bool  # whether all its tokens are chosen alike, whichever came before, and nothing is told but the tokens
    pooling: Pooling | None  # of the vector that it ends with, as soon as its prompt has run; None: of none
    scored: ScoredBranch | None  # the continuations of which it scores tokens, and gets none; None: of none
    content_root: bytes  # what besides its token ids its K and V depend on
    rope_offset: int  # the row of the rotary tables at which its positions begin
    classified: bool  # whether its vector is what the classification head makes of the pooled states
    second_segment: int  # from which token on its tokens have the type 1; 0: none has

    # Written by the Engine
    tokens: array[int]  # the prompt, then the output
    logprobs: CollectedLogprobs | None  # of the output tokens; None: the request does not ask for them
    prompt_scores: (
        PromptScores | None
    )  # log-probabilities of the prompt; None: the request does not ask for them
    loops: LoopDetector | None  # of the output tokens; None: the answer may run in circles
    bad: BadTokens | None  # tokens that the answer may not have one behind the other; None: it may have all
    watched: bool  # whether a token has to be looked at for more than `stop_token_ids` and the length
    queued_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    constraint: Constraint | None = None  # what the answer has to follow
    mask: int | None = None  # the number under which plans name its mask
    needs_sync: bool = False  # no step looks ahead of its tokens: a step may give it none or several
    placeholders: int = 0  # how many of the last tokens have values that only the device knows
    pooled: States | None = None  # of its vector: the sum of its hidden states so far, or the last one
    drafts: int = 0  # how many of the last tokens are proposals, which the next step that runs it verifies
    draft_parents: list[int] = field(default_factory=list)  # of these, where they are a tree: see DraftTree
    drafting: bool = False  # whether the next step that runs it is waited for, because of drafts
    draft_masks: list[int] = field(
        default_factory=list
    )  # the masks behind each of these, where it has a constraint
    jump_forward_tokens: int = 0  # output tokens that had to come and were not sampled

    # Written by the Scheduler. The Engine changes `status` between RUNNING and AWAITING_TOKENS
    status: SequenceStatus = SequenceStatus.WAITING
    arrival: int = 0  # place in the order of arrival, kept over a preemption
    computed: int = 0  # tokens whose K and V are in the cache
    # The most tokens computed before one; running them again is recomputation
    computed_before_preemption: int = 0
    reserved: int = 0  # while it waits: of how many first blocks the contents are kept for it
    cached_tokens: int = 0  # prompt tokens taken from a shared prefix instead of being run
    preemptions: int = 0

    # Written by BlockTables: lists with an element for each cache group, empty while the sequence waits
    tables: list[list[int]] = field(default_factory=list)  # blocks by position
    freed: list[int] = field(default_factory=list)  # how many leading entries of the table are free again

    # Written by the Engine, as the runner says
    masking: Masking = field(default_factory=Masking)

    # Grows as block hashes are asked for: of the prompt's full blocks
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
        """Make a sequence of a request, as long as the model lets it become."""
        params, prompt = request.params, array("i", request.prompt.tobytes())
        logprobs = CollectedLogprobs() if params.asks_logprobs else None
        reshaped = params.penalised or params.min_tokens > 0 or params.logit_bias or params.narrowed
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
            steady=params.steady,
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
        """Whether nothing but max_length can end it."""
        return self.request.params.has_known_length

    @property
    def looks_back(self) -> bool:
        """Whether the tokens that it may get depend on the ones before, so that these must be known."""
        return self.bad is not None and self.bad.looks_back

    @property
    def begins_request(self) -> bool:
        """Whether it is the first sequence of its request."""
        return self.scored is None or self.scored.is_first

    @property
    def most_cached(self) -> int:
        """The most tokens that may come from the cache instead of being run: those behind which nothing is asked."""
        last = len(self.tokens) - 1
        if self.pooling not in (None, "last"):  # made of hidden states, which the cache has none of
            return 0
        if self.prompt_scores is not None and not self.prompt_scores.complete:
            return 0
        return last if self.scored is None else min(self.scored.branch.first, last)

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
        return len(self.tokens) - self.placeholders - self.drafts

    def take(self, token: int) -> None:
        """Append the next token, or put it in the place of the first placeholder."""
        if self.placeholders:
            self.tokens[-self.placeholders] = token
            self.placeholders -= 1
        else:
            self.tokens.append(token)

    def take_unwatched(self, token: int, now: float) -> FinishReason | None:
        """Append the next token of a sequence that is not watched and has no drafts; why it ends, if it does."""
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

    def take_run(self, tokens: list[int], now: float) -> bool:
        """Put the tokens of several steps in the places of the first placeholders, unless one of them is none or may
        end the answer; whether it did so. The sequence is not watched."""
        if NO_TOKEN in tokens or not self.stop_token_ids.isdisjoint(tokens):
            return False
        first = len(self.tokens) - self.placeholders
        self.tokens[first : first + len(tokens)] = array("i", tokens)
        self.placeholders -= len(tokens)
        if self.first_token_s is None:
            self.first_token_s = now
        return True

    def pool(self, start: int, states: States) -> None:
        """Take the hidden states, (1, hidden), of a chunk that begins at `start`. A mean begins anew with its prompt,
        which a preempted sequence runs again as a whole."""
        if self.pooled is None or start == 0 or self.pooling != "mean":
            self.pooled = states.copy()
            return
        # The sum of infinities is no number, and found at the end
        with np.errstate(invalid="ignore"):
            self.pooled = self.pooled + states

    @property
    def vector(self) -> Vector | None:
        """The vector of its prompt, or its logits; None, if that has not run, or they are not finite numbers."""
        if self.pooled is None:
            return None
        parts = self.prompt_length if self.pooling == "mean" and not self.classified else 1
        values = (self.pooled[0] / parts).astype(np.float32)
        return Vector(values) if np.isfinite(values).all() else None

    def tokens_known(self) -> None:
        """The tokens of a step are known. If it awaited those, it may be scheduled again; it may have run on behind a
        placeholder before it was made to wait."""
        if self.status is _AWAITING and not self.placeholders:
            self.status = SequenceStatus.RUNNING

    def ends_with(self, token: int) -> FinishReason | None:
        """Say why the sequence ends with its newest known token, if it does. To be asked of every token of a sequence
        that is watched, once."""
        length = self.known_length
        looped = self.loops is not None and self.loops.closes(self.tokens, length)
        if (looped or token in self.stop_token_ids) and self._may_end(length):
            return "stop" if token in self.stop_token_ids else "repetition"
        return "length" if length >= self.max_length else None

    def _may_end(self, length: int) -> bool:
        return length - self.prompt_length >= self.request.params.min_tokens

    def take_none(self) -> None:
        """Remove the first placeholder: its step gave no token."""
        if self.placeholders:
            del self.tokens[-self.placeholders]
            self.placeholders -= 1

    def drop_placeholders(self, count: int | None = None) -> None:
        """Remove so many placeholders, or all, because the sequence has ended."""
        count = self.placeholders if count is None else count
        if count:
            del self.tokens[-count:]
            self.placeholders -= count

    def propose(self, tokens: Iterable[int], parents: Iterable[int] = ()) -> None:
        """Append drafts: the next step runs them, too, and its tokens say how many of them were right. `parents`: where
        they are a tree, whose nodes lie one behind the other; see DraftTree."""
        assert not self.placeholders, "its last tokens are not known"
        assert self.status is not _AWAITING, "a step runs it"
        assert not self.drafts, "it has drafts"
        before = len(self.tokens)
        self.tokens.extend(tokens)
        self.drafts = len(self.tokens) - before
        self.draft_parents = without_chain([*parents])

    def drop_drafts(self, keep: int = 0) -> None:
        """Remove the drafts behind the first `keep`."""
        if self.drafts > keep:
            del self.tokens[keep - self.drafts :]
            self.drafts = keep
            self.draft_parents = without_chain(self.draft_parents[:keep])

    def block_hash(self, index: int, block_size: int) -> bytes:
        """Digest of the first (index + 1) × block_size prompt tokens: each block hashes its parent's digest, the first
        the content root."""
        while len(self.hashes) <= index:
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else self.content_root
            piece = self.tokens[start : start + block_size].tobytes()
            self.hashes.append(blake2b(parent + piece, digest_size=16).digest())
        return self.hashes[index]

    def content(self, index: int, block_size: int) -> bytes:
        """Digest of the prompt up to the end of any block that holds some of it, of the last one as far as it is
        filled."""
        start = index * block_size
        if start + block_size <= self.prompt_length:
            return self.block_hash(index, block_size)
        parent = self.block_hash(index - 1, block_size) if index else self.content_root
        return blake2b(parent + self.tokens[start : self.prompt_length].tobytes(), digest_size=16).digest()

    def block_hashes(self, count: int, block_size: int) -> list[bytes]:
        """Digests of the first `count` blocks, which must be full of prompt."""
        if count:
            self.block_hash(count - 1, block_size)
        return self.hashes[:count]

    def prompt_blocks(self, tokens: int, block_size: int) -> int:
        """How many full blocks of prompt lie within the first `tokens` tokens."""
        return min(tokens, self.prompt_length) // block_size
