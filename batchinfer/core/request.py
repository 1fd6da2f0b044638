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
    """Return the number of leading tokens that two prompts share."""
    length = min(len(a), len(b))
    if not length:
        return 0
    differ = a[:length] != b[:length]
    first = int(differ.argmax())
    return first if differ[first] else length


def common_prefixes(prompts: Sequence[TokenIds]) -> list[int]:
    """Return for each prompt except the last the number of leading tokens that it shares with the next prompt."""
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
    """The reason why a row is an error row.

    Args:
        code: The error code, such as "bad_json" or "prompt_too_long".
        error_class: What causes the error: the input, a policy, a lack of resources, or the engine.
        message: The message for the user, at most 2 KiB, without text of the prompt.
        retryable: True if another run may succeed.
    """

    code: str
    error_class: ErrorClass
    message: str
    retryable: bool = False


class ConstraintFailed(Exception):
    """A row's answer cannot be continued so that it matches its constraint.

    Attributes:
        error: The error of the row.
    """

    def __init__(self, error: RowError) -> None:
        super().__init__(error.message)
        self.error = error


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One call of the model. Duplicate rows share a request.

    Args:
        key: The work key, 32 bytes.
        prompt: (n,) int32, the tokens of the prompt, at least one.
        params: The sampling parameters.
        shares_next: The number of leading tokens that the prompt shares with the next request of the plan. 0: none, or
            unknown.
        draft: (m,) int32, a probable answer, which is used as draft tokens. None: unknown.
        draws: The seed of the request's random draws, at least 16 bytes. Empty: `key` is the seed.
    """

    key: bytes
    prompt: TokenIds
    params: SamplingParams
    shares_next: int = 0
    draft: TokenIds | None = None
    draws: bytes = b""

    def __reduce__(self) -> Pickled:
        # Several times faster than the default, and processes exchange millions of requests
        draft = None if self.draft is None else _data(self.draft)
        more = (draft, self.draws) if self.draws else () if draft is None else (draft,)
        return _remade, (self.key, _data(self.prompt), self.params, self.shares_next, *more)

    @property
    def draw_key(self) -> bytes:
        """Return the 16 bytes that, together with the position of a token, determine the request's random draws."""
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
    # The arrays are writable
    drafted = None if draft is None else np.frombuffer(bytearray(draft), np.int32)
    return Request(key, np.frombuffer(bytearray(token_ids), np.int32), params, shares_next, drafted, draws)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """Log-probabilities of m tokens, and of the k likeliest tokens at each of their positions.

    They are computed from the model's logits before penalties, masks, temperature and filters.

    Args:
        chosen: (m,), the log-probabilities of the tokens.
        top: (m, k), the log-probabilities of the k likeliest tokens at each position, descending.
        top_ids: (m, k), the ids of these tokens.
    """

    chosen: NDArray[np.float32]
    top: NDArray[np.float32]
    top_ids: TokenIds

    def __len__(self) -> int:
        return len(self.chosen)


class Output(Protocol):
    """The output of a request: Tokens, a Vector or Scores. See `batchinfer.store.outputs`."""

    @property
    def held_bytes(self) -> int:
        """Return the memory of the output's large arrays in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptLogprobs:
    """The log-probability of each prompt token, given the tokens before it.

    Args:
        token_ids: (n,) int32, the prompt.
        logprobs: (n - 1,), of all prompt tokens except the first.
    """

    token_ids: TokenIds
    logprobs: TokenLogprobs

    @property
    def held_bytes(self) -> int:
        """Return the memory of the tokens and their log-probabilities in bytes."""
        found = self.logprobs
        return self.token_ids.nbytes + found.chosen.nbytes + found.top.nbytes + found.top_ids.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The output of a request that generates text.

    Args:
        token_ids: (m,) int32, the generated tokens, including the EOS or stop token that ended the text.
        text_length: The number of characters of the text to keep, if a stop text ended it. None: all.
        logprobs: (m,), the log-probabilities of the tokens. None: not requested.
        prompt: The log-probabilities of the prompt. None: not requested.
    """

    token_ids: TokenIds
    text_length: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt: PromptLogprobs | None = None

    @property
    def held_bytes(self) -> int:
        """Return the memory of all log-probabilities in bytes."""
        found, before = self.logprobs, 0 if self.prompt is None else self.prompt.held_bytes
        return before + (
            0 if found is None else found.chosen.nbytes + found.top.nbytes + found.top_ids.nbytes
        )

    def __reduce__(self) -> Pickled:
        more = () if self.prompt is None else (self.prompt,)
        return _remade_tokens, (_data(self.token_ids), self.text_length, self.logprobs, *more)


def _remade_tokens(token_ids: bytes, *more: Any) -> Tokens:
    return Tokens(np.frombuffer(bytearray(token_ids), np.int32), *more)


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """The output of a request for a vector or for classification logits.

    Args:
        values: (hidden,), the pooled hidden states of the prompt, neither normalised nor truncated; or (labels,), the
            logits.
    """

    values: NDArray[np.float32]

    @property
    def held_bytes(self) -> int:
        """Return the memory of the vector in bytes."""
        return self.values.nbytes

    def __reduce__(self) -> Pickled:
        return _remade_vector, (np.asarray(self.values, np.float32).tobytes(),)


def _remade_vector(values: bytes) -> Vector:
    return Vector(np.frombuffer(bytearray(values), np.float32))


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The output of a scoring request: log-probabilities of its continuations' tokens, concatenated.

    Args:
        logprobs: (n,), the log-probability of each token, a natural logarithm.
        greedy: (n,), True if the token is the most likely one.
        lengths: The number of tokens of each continuation.
    """

    logprobs: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    lengths: tuple[int, ...]

    @property
    def held_bytes(self) -> int:
        """Return the memory of the scores in bytes."""
        return self.logprobs.nbytes + self.greedy.nbytes

    def __reduce__(self) -> Pickled:
        return _remade_scores, (self.logprobs.tobytes(), self.greedy.tobytes(), self.lengths)


def _remade_scores(logprobs: bytes, greedy: bytes, lengths: tuple[int, ...]) -> Scores:
    found = np.frombuffer(bytearray(logprobs), np.float32), np.frombuffer(bytearray(greedy), np.bool_)
    return Scores(*found, lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The answer to a request.

    Args:
        key: The work key of the request.
        output: Tokens, a Vector or Scores, as the request asks. None: there is only an error.
        finish_reason: Why the answer ended.
        error: The error of the row. None: there is none.
        engine_class: On a cluster, the machine class that computed the answer. None: not on a cluster.
    """

    key: bytes
    output: Output | None
    finish_reason: FinishReason
    error: RowError | None = None
    engine_class: str | None = None

    @property
    def tokens(self) -> Tokens:
        """Return the output if the request generated text, else an empty output of type Tokens."""
        return self.output if isinstance(self.output, Tokens) else Tokens(np.empty(0, np.int32))

    def __reduce__(self) -> Pickled:
        return Completion, (self.key, self.output, self.finish_reason, self.error, self.engine_class)
