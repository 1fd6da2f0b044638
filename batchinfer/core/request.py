"""Requests and completions, which processes and rooms exchange. Imports no torch."""

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
Pickled = tuple[Callable[..., Any], tuple[Any, ...]]  # the result of __reduce__: a function and its arguments
_HEAD = 16  # leading tokens of prompts that are compared in one numpy operation


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    """Return the length of the common prefix of two token sequences."""
    length = min(len(a), len(b))
    if not length:
        return 0
    differ = a[:length] != b[:length]
    first = int(differ.argmax())
    return first if differ[first] else length


def common_prefixes(prompts: Sequence[TokenIds]) -> list[int]:
    """Return for each prompt except the last the length of its common prefix with the next one.

    The first tokens of all prompts are compared at once; only longer common prefixes are compared pair by pair.
    """
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
    """The reason why a row is an error row."""

    code: str  # e.g. "bad_json", "prompt_too_long"
    error_class: ErrorClass
    message: str  # at most 2 KiB, without text of the prompt
    retryable: bool = False


class ConstraintFailed(Exception):
    """A constraint cannot be continued; carries the error of its row."""

    def __init__(self, error: RowError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One call of the model. Duplicate rows share a request."""

    key: bytes  # the work key, 32 bytes
    prompt: TokenIds  # (n,) int32, n >= 1
    params: SamplingParams
    shares_next: int = 0  # tokens of the common prefix with the plan's next request; 0: unknown
    draft: TokenIds | None = None  # (m,) int32: a probable answer, as draft tokens; None: unknown
    draws: bytes = b""  # at least 16 bytes: the key of its random draws; empty: `key`

    def __reduce__(self) -> Pickled:
        """Pickle only the values, several times faster than the default: processes exchange millions of requests."""
        draft = None if self.draft is None else _data(self.draft)
        more = (draft, self.draws) if self.draws else () if draft is None else (draft,)
        return _remade, (self.key, _data(self.prompt), self.params, self.shares_next, *more)

    @property
    def draw_key(self) -> bytes:
        """Return the 16 bytes that, with the position of a token, determine its random draw."""
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
    """Rebuild a pickled request. Its arrays are writable."""
    drafted = None if draft is None else np.frombuffer(bytearray(draft), np.int32)
    return Request(key, np.frombuffer(bytearray(token_ids), np.int32), params, shares_next, drafted, draws)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of m tokens, and of the k likeliest tokens at each position.

    They are computed from the model's logits before penalties, masks, temperature and filters.
    """

    chosen: NDArray[np.float32]  # (m,)
    top: NDArray[np.float32]  # (m, k), descending
    top_ids: TokenIds  # (m, k)

    def __len__(self) -> int:
        return len(self.chosen)


class Output(Protocol):
    """The output of a request: Tokens, a Vector or Scores. See `batchinfer.store.outputs`."""

    @property
    def held_bytes(self) -> int:
        """Return the memory of large arrays in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """The log-probability of each prompt token, given the tokens before it."""

    token_ids: TokenIds  # (n,) int32: the prompt
    logprobs: TokenLogprobs  # (n - 1,): of all tokens except the first

    @property
    def held_bytes(self) -> int:
        """Return the memory of the arrays in bytes."""
        found = self.logprobs
        return self.token_ids.nbytes + found.chosen.nbytes + found.top.nbytes + found.top_ids.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """A generated text."""

    token_ids: TokenIds  # (m,) int32, including the EOS or stop token that ended it
    text_length: int | None = None  # characters to keep if a stop string cut the text; None: all
    logprobs: TokenLogprobs | None = None  # (m,), if requested
    prompt: PromptLogprobs | None = None  # if requested

    @property
    def held_bytes(self) -> int:
        """Return the memory of log-probabilities in bytes."""
        found, before = self.logprobs, 0 if self.prompt is None else self.prompt.held_bytes
        return before + (
            0 if found is None else found.chosen.nbytes + found.top.nbytes + found.top_ids.nbytes
        )

    def __reduce__(self) -> Pickled:
        """Pickle only the values; see `Request.__reduce__`."""
        more = () if self.prompt is None else (self.prompt,)
        return _remade_tokens, (_data(self.token_ids), self.text_length, self.logprobs, *more)


def _remade_tokens(token_ids: bytes, *more: Any) -> Tokens:
    return Tokens(np.frombuffer(bytearray(token_ids), np.int32), *more)


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """The pooled hidden states of a prompt (not normalised or truncated), or classification logits."""

    values: NDArray[np.float32]  # (hidden,) or (labels,)

    @property
    def held_bytes(self) -> int:
        """Return the memory of the values in bytes."""
        return self.values.nbytes

    def __reduce__(self) -> Pickled:
        """Pickle only the values; see `Request.__reduce__`."""
        return _remade_vector, (np.asarray(self.values, np.float32).tobytes(),)


def _remade_vector(values: bytes) -> Vector:
    return Vector(np.frombuffer(bytearray(values), np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The log-probabilities of the tokens of a request's continuations, concatenated."""

    logprobs: NDArray[np.float32]  # (n,), natural logarithms
    greedy: NDArray[np.bool_]  # (n,): True if the token is the argmax of its logits
    lengths: tuple[int, ...]  # tokens of each continuation

    @property
    def held_bytes(self) -> int:
        """Return the memory of the arrays in bytes."""
        return self.logprobs.nbytes + self.greedy.nbytes

    def __reduce__(self) -> Pickled:
        """Pickle only the values; see `Request.__reduce__`."""
        return _remade_scores, (self.logprobs.tobytes(), self.greedy.tobytes(), self.lengths)


def _remade_scores(logprobs: bytes, greedy: bytes, lengths: tuple[int, ...]) -> Scores:
    found = np.frombuffer(bytearray(logprobs), np.float32), np.frombuffer(bytearray(greedy), np.bool_)
    return Scores(*found, lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The answer to a Request."""

    key: bytes
    # Tokens; a Vector if the request has a pooling; Scores of continuations; None: only an error
    output: Output | None
    finish_reason: FinishReason
    error: RowError | None = None
    engine_class: str | None = None  # on a cluster, the machine class that computed the answer

    @property
    def tokens(self) -> Tokens:
        """Return the output if it is a text, else an empty Tokens."""
        return self.output if isinstance(self.output, Tokens) else Tokens(np.empty(0, np.int32))

    def __reduce__(self) -> Pickled:
        """Pickle only the values; see `Request.__reduce__`."""
        return Completion, (self.key, self.output, self.finish_reason, self.error, self.engine_class)
