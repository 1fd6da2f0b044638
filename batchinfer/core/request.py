"""Requests (a row to do) and completions (its answer), which travel between the rooms.

No torch, no files: every room may import this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.sampling import SamplingParams

FinishReason = Literal["stop", "length", "repetition", "error"]
ErrorClass = Literal["input", "policy", "resource", "engine"]
TokenIds = NDArray[np.int32]
Pickled = tuple[Callable[..., Any], tuple[Any, ...]]  # what makes an object again, and of what
_HEAD = 16  # tokens of prompts that are compared at once


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Return how many tokens at their beginning the two have in common."""
    length = min(len(a), len(b))
    if not length:
        return 0
    differ = a[:length] != b[:length]
    first = int(differ.argmax())
    return first if differ[first] else length


def common_prefixes(prompts: Sequence[TokenIds]) -> list[int]:
    """Return for each prompt but the last how many tokens it and the next one have in common at their beginning: only
    those that begin alike are compared pair by pair."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    heads, inside = np.zeros((len(prompts), _HEAD), np.int32), np.arange(_HEAD) < lengths[:, None]
    heads[inside] = np.concatenate([prompt[:_HEAD] for prompt in prompts] or [np.zeros(0, np.int32)])
    same = (heads[1:] == heads[:-1]) & inside[1:] & inside[:-1]
    alike = same.all(axis=1)
    found: list[int] = np.where(alike, _HEAD, same.argmin(axis=1)).tolist()
    for place in np.flatnonzero(alike).tolist():
        found[place] += common_prefix(prompts[place][_HEAD:], prompts[place + 1][_HEAD:])
    return found


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row became an error row. `message` is at most 2 KiB and holds no prompt text."""

    code: str  # e.g. "bad_json", "prompt_too_long"
    error_class: ErrorClass
    message: str
    retryable: bool = False


class ConstraintFailed(Exception):
    """A constraint that cannot be followed any further, as the error of its row."""

    def __init__(self, error: RowError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One piece of work: what is computed once, however many rows ask for it."""

    key: bytes  # the WorkKey, 32 bytes
    prompt: TokenIds  # (n,) int32, n >= 1
    params: SamplingParams
    shares_next: int = 0  # prompt tokens that the plan's next request begins with too; 0: unknown
    draft: TokenIds | None = None  # (m,) int32, an answer that it may get; None: nobody knows of one
    draws: bytes = b""  # 16 bytes or more: the key of its random draws, where that is not its own

    def __reduce__(self) -> Pickled:
        """Processes send each other millions: what `dataclasses` and numpy do of themselves takes several times as
        long."""
        draft = None if self.draft is None else _data(self.draft)
        more = (draft, self.draws) if self.draws else () if draft is None else (draft,)
        return _remade, (self.key, _data(self.prompt), self.params, self.shares_next, *more)

    @property
    def draw_key(self) -> bytes:
        """Return the 16 bytes that its random draws are made of, with the position of a token."""
        return (self.draws or self.key)[:16]


def _data(token_ids: TokenIds) -> bytes:
    return np.asarray(token_ids, np.int32).tobytes()


def _remade(
    key: bytes,
    token_ids: bytes,
    params: SamplingParams,
    shares_next: int,
    draft: bytes | None = None,
    draws: bytes = b"",
) -> Request:
    """With arrays that can be written to, as those that were sent."""
    drafted = None if draft is None else np.frombuffer(bytearray(draft), np.int32)
    return Request(key, np.frombuffer(bytearray(token_ids), np.int32), params, shares_next, drafted, draws)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of m tokens, and of the `most` likeliest ones at the place of each.

    They are of the model's logits as they are, before penalties, masks, temperature and filters.
    """

    chosen: NDArray[np.float32]  # (m,)
    top: NDArray[np.float32]  # (m, most), in descending order
    top_ids: TokenIds  # (m, most)

    def __len__(self) -> int:
        return len(self.chosen)


class Output(Protocol):
    """An answer, of whatever kind. `batchinfer.store.outputs` has all that a kind decides."""

    @property
    def held_bytes(self) -> int:
        """The memory that it takes besides a few hundred bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """The log-probabilities of a prompt's tokens, each given those before it."""

    token_ids: TokenIds  # (n,) int32: the prompt
    logprobs: TokenLogprobs  # of all but the first, which nothing stands before: (n - 1,)

    @property
    def held_bytes(self) -> int:
        """The memory of its arrays."""
        found = self.logprobs
        return self.token_ids.nbytes + found.chosen.nbytes + found.top.nbytes + found.top_ids.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """A text: output token ids, which include the EOS or stop token that ended them."""

    token_ids: TokenIds  # (m,) int32
    text_length: int | None = None  # characters to keep, where a stop string cut the text; None: all
    logprobs: TokenLogprobs | None = None  # of all token_ids, where the request asks for them
    prompt: PromptLogprobs | None = None  # where the request asks for them

    @property
    def held_bytes(self) -> int:
        """The memory of log-probabilities."""
        found, before = self.logprobs, 0 if self.prompt is None else self.prompt.held_bytes
        return before + (
            0 if found is None else found.chosen.nbytes + found.top.nbytes + found.top_ids.nbytes
        )

    def __reduce__(self) -> Pickled:
        """Send values only, as a Request does."""
        more = () if self.prompt is None else (self.prompt,)
        return _remade_tokens, (_data(self.token_ids), self.text_length, self.logprobs, *more)


def _remade_tokens(token_ids: bytes, *more: Any) -> Tokens:
    return Tokens(np.frombuffer(bytearray(token_ids), np.int32), *more)


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """The vector of a prompt: its pooled hidden states, neither normalised nor shortened; or the logits that a
    classification head makes of them."""

    values: NDArray[np.float32]  # (hidden,), or (labels,)

    @property
    def held_bytes(self) -> int:
        """The memory of the values."""
        return self.values.nbytes

    def __reduce__(self) -> Pickled:
        """Send values only, as a Request does."""
        return _remade_vector, (np.asarray(self.values, np.float32).tobytes(),)


def _remade_vector(values: bytes) -> Vector:
    return Vector(np.frombuffer(bytearray(values), np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The log-probabilities of the tokens of a request's continuations, one continuation behind the other."""

    logprobs: NDArray[np.float32]  # (n,), natural logarithms
    greedy: NDArray[np.bool_]  # (n,): whether each token is the argmax of its logits
    lengths: tuple[int, ...]  # tokens of each continuation

    @property
    def held_bytes(self) -> int:
        """The memory of the tokens' values."""
        return self.logprobs.nbytes + self.greedy.nbytes

    def __reduce__(self) -> Pickled:
        """Send values only, as a Request does."""
        return _remade_scores, (self.logprobs.tobytes(), self.greedy.tobytes(), self.lengths)


def _remade_scores(logprobs: bytes, greedy: bytes, lengths: tuple[int, ...]) -> Scores:
    found = np.frombuffer(bytearray(logprobs), np.float32), np.frombuffer(bytearray(greedy), np.bool_)
    return Scores(*found, lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The answer to a Request. Engines give Tokens, a Vector where the request has a pooling, or Scores of its
    continuations."""

    key: bytes
    output: Output | None  # None: there is an error, and nothing else
    finish_reason: FinishReason
    error: RowError | None = None
    engine_class: str | None = None  # the class of machine that gave it, on a cluster

    @property
    def tokens(self) -> Tokens:
        """Return the output of a completion that an engine gave; no tokens if there is none."""
        return self.output if isinstance(self.output, Tokens) else Tokens(np.empty(0, np.int32))

    def __reduce__(self) -> Pickled:
        """Send values only, as a Request does."""
        return Completion, (self.key, self.output, self.finish_reason, self.error, self.engine_class)
