"""How the tokens of an answer are chosen, and what the parameters may be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any, Literal, Self

from batchinfer.core.reasoning import ReasoningTokens

Truncate = Literal["error", "left", "right"]  # what is done with a prompt too long for the model
# The vector of a prompt: the hidden state of its last token, the mean of all, or the state of its first (cls)
Pooling = Literal["last", "mean", "cls"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a number: from `low` to `high`, or with `above` from just above `low`."""

    low: float
    high: float
    above: bool = False


INT32_MAX = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_BIASED = 1024  # tokens of a logit_bias
MAX_ALLOWED = 4096  # of allowed_token_ids
MAX_BAD_WORDS = 256
BIAS = Bounds(-100, 100)  # of each of them
MAX_SAMPLES = 1024  # answers to one row
MAX_SCHEMA_BYTES = 1 << 20  # of a JSON Schema as text
JSON_CONSTRAINTS = ("json_schema", "json_object")
CONSTRAINTS = (*JSON_CONSTRAINTS, "regex", "choice", "grammar", "tool_call")
# What the numbers of SamplingParams may be, wherever they come from: job file, column, OpenAI request
BOUNDS: Mapping[str, Bounds] = {
    "max_tokens": Bounds(1, INT32_MAX),
    "min_tokens": Bounds(0, INT32_MAX),
    "temperature": Bounds(0, 100),
    "top_p": Bounds(0, 1, above=True),
    "top_k": Bounds(0, INT32_MAX),
    "min_p": Bounds(0, 1),
    "seed": Bounds(-(2**63), 2**63 - 1),
    # Divides and multiplies logits: a value near 0 would make them infinite
    "repetition_penalty": Bounds(0.01, 100),
    "presence_penalty": Bounds(-100, 100),
    "frequency_penalty": Bounds(-100, 100),
    "logprobs": Bounds(0, MAX_LOGPROBS),
    "prompt_logprobs": Bounds(0, MAX_LOGPROBS),
    "repetition_stop": Bounds(0, INT32_MAX),
    "thinking_budget": Bounds(0, INT32_MAX),
}
# What requests and other programs call these parameters
OTHER_NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "include_stop_str_in_output": "include_stop",
    "thinking_token_budget": "thinking_budget",
    "guided_json": "json_schema",
    "guided_json_object": "json_object",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
# Parameters that nobody sets: they follow from a row's prompt and tools, or from the job's task and output
DERIVED = (
    *("after_reasoning", "tool_call", "pooling", "scored", "classified", "second_segment", "bad_tokens"),
    *("confidence", "adapter"),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a row's tokens are chosen. `temperature == 0` means greedy, where only limits and stops matter."""

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None  # None: no log-probabilities; n: of each token, and of the n most likely ones
    repetition_stop: int = 0  # an answer whose last so many tokens repeat a short cycle ends; 0: off
    include_stop: bool = False  # the stop string that ends an answer stays in its text
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added to their logits
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens that an answer may have; (): all
    bad_words: tuple[str, ...] = ()  # texts that an answer does not get; see `bad_tokens`
    # What an answer has to look like; one of them at most
    json_schema: str | None = None  # JSON text of a JSON Schema
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None  # Lark, or GBNF
    thinking_budget: int | None = None  # most tokens of reasoning: then its end is forced
    # The tokens around the reasoning that the budget limits, and behind which the constraint begins: those of
    # ReasoningTokens; (): there is no reasoning, or nothing asks for its end
    after_reasoning: tuple[tuple[int, ...], ...] = ()
    # The request asks for a vector of its prompt, and for no token; None: for tokens
    pooling: Pooling | None = None
    # A grammar of calls, with the schemas of their arguments: see `batchinfer.input.tool_calls.call_grammar`
    tool_call: str | None = None
    # Lengths of the continuations that end the prompt, one behind the other, each of which would follow what is before
    # them all: the request asks for their log-probabilities, and for no token. (): for tokens. See `Continuations`
    scored: tuple[int, ...] = ()
    # The checkpoint's classification head makes logits of the vector, which are the answer in its place
    classified: bool = False
    # Tokens of the prompt from this one on have the token type 1, and those before it 0; 0: all have 0
    second_segment: int = 0
    # The tokens of `bad_words`: an answer that ends with all but the last of them does not get that one
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    # The log-probability of each token among those that the constraint allows at its place. They take the place of
    # `logprobs`, which are among all tokens
    confidence: bool = False
    # The fingerprint of the adapter that the answer is computed with; "": the model as it is
    adapter: str = ""
    # None: no log-probabilities of the prompt; n: of its tokens but the first, and of the n most likely ones at the
    # place of each
    prompt_logprobs: int | None = None

    @classmethod
    def vector(cls, pooling: Pooling) -> Self:
        """Return the parameters of a request for a vector."""
        return cls(max_tokens=0, pooling=pooling)

    @classmethod
    def logits(cls, pooling: Pooling, second_segment: int = 0) -> Self:
        """Return the parameters of a request for what the classification head makes of a vector."""
        return cls(max_tokens=0, pooling=pooling, classified=True, second_segment=second_segment)

    @classmethod
    def scores(cls, lengths: tuple[int, ...] = ()) -> Self:
        """Return the parameters of a request for the log-probabilities of continuations of these lengths."""
        return cls(max_tokens=0, scored=lengths)

    @property
    def reasoning(self) -> ReasoningTokens | None:
        """Return the tokens around the reasoning that a budget limits, or behind which a constraint begins."""
        return ReasoningTokens(*self.after_reasoning) if self.after_reasoning else None

    @property
    def constraint(self) -> str | None:
        """Return the name of the constraint that an answer has to follow."""
        return next((name for name in CONSTRAINTS if getattr(self, name)), None)

    @property
    def has_known_length(self) -> bool:
        """Whether nothing but max_tokens, or the model's context, can end an answer."""
        ends = (
            self.stop
            or self.stop_token_ids
            or self.repetition_stop
            or self.constraint
            or self.after_reasoning
        )
        return not self.gives_tokens or (self.ignore_eos and not ends)

    @property
    def gives_tokens(self) -> bool:
        """Whether the answer is a text, and not made of the prompt alone."""
        return self.pooling is None and not self.scored

    @property
    def counted(self) -> SamplingParams:
        """Return what decides how long an answer may be, whether that is known, which K and V its tokens have, and
        whether its prompt may come from the cache."""
        known = self.has_known_length
        return SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=known,
            pooling=self.pooling if self.pooling == "mean" else None,
            scored=self.scored,
            adapter=self.adapter,
            prompt_logprobs=None if self.prompt_logprobs is None else 0,
        )

    @property
    def constraint_digest(self) -> bytes:
        """Return a digest by which a constraint is remembered, because it may take a megabyte itself."""
        name = self.constraint
        said = (name, None if name is None else getattr(self, name))
        return sha256(repr(said).encode()).digest()

    @property
    def asks_logprobs(self) -> bool:
        """Whether the answer has log-probabilities of its tokens, of either kind."""
        return self.logprobs is not None or self.confidence

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken each time."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether tokens that stand in a text already are made less or more likely."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def narrowed(self) -> bool:
        """Whether there are tokens that an answer may not have, whatever its constraint says."""
        return bool(self.allowed_token_ids or self.bad_tokens)

    @property
    def steady(self) -> bool:
        """Whether all tokens of an answer are chosen alike, whichever came before, and nothing but the tokens is
        told."""
        looks_back = self.penalised or self.min_tokens or self.bad_tokens
        guided = self.constraint is not None or self.reasoning is not None
        return not looks_back and not guided and not self.asks_logprobs

    def canonical(self) -> Self:
        """The same answer, fewer spellings: stops in order, and greedy work ignores what only shapes random draws."""
        stops, ids = tuple(sorted(set(self.stop))), tuple(sorted(set(self.stop_token_ids)))
        ordered = replace(self, stop=stops, stop_token_ids=ids, choice=tuple(sorted(set(self.choice))))
        bias = tuple(sorted(pair for pair in self.logit_bias if pair[1]))
        ordered = replace(ordered, include_stop=self.include_stop and bool(stops), logit_bias=bias)
        words, tokens = tuple(sorted(set(self.bad_words))), tuple(sorted(set(self.bad_tokens)))
        allowed = tuple(sorted(set(self.allowed_token_ids)))
        ordered = replace(ordered, allowed_token_ids=allowed, bad_words=words, bad_tokens=tokens)
        return replace(ordered, top_p=1.0, top_k=0, min_p=0.0, seed=0) if self.greedy else ordered

    def to_json(self) -> str:
        """Canonical JSON (sorted keys, no spaces): equal parameters give equal text.

        A parameter at its default is left out, so that one which is added later changes no stored text and no key.
        The defaults therefore never change: a stored text without the parameter would then mean another value.
        """
        said = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        return json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        values: dict[str, Any] = json.loads(text)
        return cls(**{name: _frozen(value) for name, value in values.items()})


def _frozen(value: Any) -> Any:
    """Return tuples for lists, also within them."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
