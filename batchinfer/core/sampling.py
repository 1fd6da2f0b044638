"""Sampling parameters of requests, and their bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any, Literal, Self

from batchinfer.core.reasoning import ReasoningTokens

Truncate = Literal["error", "left", "right"]  # how to handle a prompt that is too long for the model
# The hidden state of the last token, the mean over all tokens, or the hidden state of the first token (cls)
Pooling = Literal["last", "mean", "cls"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of allowed values of a number.

    Attributes:
        low: The lower bound.
        high: The upper bound, which is allowed.
        above: True if `low` itself is not allowed.
    """

    low: float
    high: float
    above: bool = False


INT32_MAX = 2**31 - 1
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_BIASED = 1024  # tokens in a logit_bias
MAX_ALLOWED = 4096  # tokens in allowed_token_ids
MAX_BAD_WORDS = 256
BIAS = Bounds(-100, 100)  # of a token in a logit_bias
MAX_SAMPLES = 1024  # answers per row
MAX_SCHEMA_BYTES = 1 << 20  # of a JSON Schema as text
JSON_CONSTRAINTS = ("json_schema", "json_object")
CONSTRAINTS = (*JSON_CONSTRAINTS, "regex", "choice", "grammar", "tool_call")
# Bounds of the numbers in SamplingParams, for all sources: job file, column, OpenAI request
BOUNDS: Mapping[str, Bounds] = {
    "max_tokens": Bounds(1, INT32_MAX),
    "min_tokens": Bounds(0, INT32_MAX),
    "temperature": Bounds(0, 100),
    "top_p": Bounds(0, 1, above=True),
    "top_k": Bounds(0, INT32_MAX),
    "min_p": Bounds(0, 1),
    "seed": Bounds(-(2**63), 2**63 - 1),
    # Divides or multiplies logits, which a value near 0 would make infinite
    "repetition_penalty": Bounds(0.01, 100),
    "presence_penalty": Bounds(-100, 100),
    "frequency_penalty": Bounds(-100, 100),
    "logprobs": Bounds(0, MAX_LOGPROBS),
    "prompt_logprobs": Bounds(0, MAX_LOGPROBS),
    "repetition_stop": Bounds(0, INT32_MAX),
    "thinking_budget": Bounds(0, INT32_MAX),
}
# Names of these parameters in OpenAI requests and other programs
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
# Parameters that users cannot set: they follow from a row's prompt and tools, or from the job's task and output
DERIVED = (
    *("after_reasoning", "tool_call", "pooling", "scored", "classified", "second_segment", "bad_tokens"),
    *("confidence", "adapter"),
)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling parameters of a request. Parameters that vLLM has, too, have the same name and meaning.

    Args:
        max_tokens: The maximum number of generated tokens.
        min_tokens: The minimum number of generated tokens.
        temperature: The temperature. 0 means greedy.
        top_p: The probability mass of the tokens that may be drawn.
        top_k: The number of likeliest tokens that may be drawn. 0: off.
        min_p: The minimum probability of a token that may be drawn, as a fraction of the likeliest token's probability.
        seed: The seed of random draws.
        stop: Texts that end the answer.
        stop_token_ids: Tokens that end the answer.
        ignore_eos: If True, EOS tokens do not end the answer.
        repetition_penalty: Logits of tokens in prompt and answer are divided by it if positive, else multiplied. 1:
            off.
        presence_penalty: Subtracted from the logits of tokens in the answer, once.
        frequency_penalty: Subtracted from the logits of tokens in the answer, per occurrence.
        logprobs: Return the log-probability of each token, and of this many likeliest tokens. None: return none.
        repetition_stop: An answer ends if this number of its last tokens repeat a short cycle of tokens. 0: off.
        include_stop: True to keep the stop text that ends an answer in the answer's text.
        logit_bias: Pairs of a token id and the value that is added to its logit.
        allowed_token_ids: The only tokens that an answer may have. (): all.
        bad_words: Texts that must not occur in an answer; see `bad_tokens`.
        json_schema: Constraint: the JSON text of a JSON Schema. At most one constraint is set.
        json_object: Constraint: the answer is a JSON object.
        regex: Constraint: a regular expression.
        choice: Constraint: the possible answers.
        grammar: Constraint: a grammar in Lark or GBNF.
        thinking_budget: The maximum number of reasoning tokens, after which the end of reasoning is forced. None: no
            limit.
        after_reasoning: The reasoning markers, as the fields of ReasoningTokens. They are set if a budget limits the
            reasoning, or a constraint begins after it.
        pooling: Compute a vector of the prompt with this pooling instead of generating tokens.
        tool_call: Constraint: a grammar of tool calls (see `batchinfer.input.tool_calls.call_grammar`).
        scored: Compute log-probabilities of continuations instead of generating tokens: the lengths of the
            continuations, which are concatenated at the end of the prompt (see `Continuations`).
        classified: True if the answer is not the vector of the prompt, but the logits of the checkpoint's
            classification head.
        second_segment: Prompt tokens from this position on have the token type 1. 0: all have type 0.
        bad_tokens: The token sequences of `bad_words`. The last token of a sequence is forbidden after the other tokens
            of it.
        confidence: Return the log-probability of each token among the tokens that its constraint allows, instead of
            `logprobs`.
        adapter: The fingerprint of the adapter. Empty: none.
        prompt_logprobs: Return the log-probabilities of prompt tokens except the first, and of this many likeliest
            tokens at each position. None: return none.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    repetition_stop: int = 0
    include_stop: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    thinking_budget: int | None = None
    after_reasoning: tuple[tuple[int, ...], ...] = ()
    pooling: Pooling | None = None
    tool_call: str | None = None
    scored: tuple[int, ...] = ()
    classified: bool = False
    second_segment: int = 0
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    confidence: bool = False
    adapter: str = ""
    prompt_logprobs: int | None = None

    @classmethod
    def vector(cls, pooling: Pooling) -> Self:
        """Return the parameters of a request for a vector of the prompt with this pooling."""
        return cls(max_tokens=0, pooling=pooling)

    @classmethod
    def logits(cls, pooling: Pooling, second_segment: int = 0) -> Self:
        """Return the parameters of a request for the logits of the checkpoint's classification head.

        Args:
            pooling: How the hidden states of a text become one vector.
            second_segment: Prompt tokens from this position on have the token type 1. 0: all have type 0.
        """
        return cls(max_tokens=0, pooling=pooling, classified=True, second_segment=second_segment)

    @classmethod
    def scores(cls, lengths: tuple[int, ...] = ()) -> Self:
        """Return the parameters of a scoring request, which computes log-probabilities of given tokens.

        Args:
            lengths: The number of tokens of each alternative continuation at the end of the prompt. (): the lengths of
                each row are set later.
        """
        return cls(max_tokens=0, scored=lengths)

    @property
    def reasoning(self) -> ReasoningTokens | None:
        """Return the reasoning markers; None unless a budget limits the reasoning or a constraint begins after it."""
        return ReasoningTokens(*self.after_reasoning) if self.after_reasoning else None

    @property
    def constraint(self) -> str | None:
        """Return the name of the constraint that is set, such as "regex"; None if there is none."""
        return next((name for name in CONSTRAINTS if getattr(self, name)), None)

    @property
    def has_known_length(self) -> bool:
        """Return True if the number of generated tokens is known before the request runs.

        This is so if only max_tokens or the model's context can end the answer, or no tokens are generated.
        """
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
        """Return True if the request generates tokens, rather than a vector, logits or scores of its prompt."""
        return self.pooling is None and not self.scored

    @property
    def for_simulation(self) -> SamplingParams:
        """Return a copy with only the sampling parameters that affect the engine's schedule, for the simulator."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            ignore_eos=self.has_known_length,
            pooling=self.pooling if self.pooling == "mean" else None,
            scored=self.scored,
            adapter=self.adapter,
            prompt_logprobs=None if self.prompt_logprobs is None else 0,
        )

    @property
    def constraint_digest(self) -> bytes:
        """Return the sha256 of the constraint's name and value."""
        name = self.constraint
        named = (name, None if name is None else getattr(self, name))
        return sha256(repr(named).encode()).digest()

    @property
    def asks_logprobs(self) -> bool:
        """Return True if log-probabilities of generated tokens are requested (`logprobs` or `confidence`)."""
        return self.logprobs is not None or self.confidence

    @property
    def greedy(self) -> bool:
        """Return True if the most likely token is always chosen."""
        return self.temperature == 0.0

    @property
    def has_penalty(self) -> bool:
        """Return True if a repetition, presence or frequency penalty is set."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def forbids_tokens(self) -> bool:
        """Return True if `allowed_token_ids` or `bad_words` forbid tokens, independently of a constraint."""
        return bool(self.allowed_token_ids or self.bad_tokens)

    @property
    def is_stateless(self) -> bool:
        """Return True if each token is sampled independently of earlier tokens, and without log-probabilities."""
        looks_back = self.has_penalty or self.min_tokens or self.bad_tokens
        guided = self.constraint is not None or self.reasoning is not None
        return not looks_back and not guided and not self.asks_logprobs

    def canonical(self) -> Self:
        """Return equivalent sampling parameters in a canonical form, so that equivalent requests have equal work keys.

        Sets are sorted. Greedy parameters have no options of random draws.
        """
        stops, ids = tuple(sorted(set(self.stop))), tuple(sorted(set(self.stop_token_ids)))
        ordered = replace(self, stop=stops, stop_token_ids=ids, choice=tuple(sorted(set(self.choice))))
        bias = tuple(sorted(pair for pair in self.logit_bias if pair[1]))
        ordered = replace(ordered, include_stop=self.include_stop and bool(stops), logit_bias=bias)
        words, tokens = tuple(sorted(set(self.bad_words))), tuple(sorted(set(self.bad_tokens)))
        allowed = tuple(sorted(set(self.allowed_token_ids)))
        ordered = replace(ordered, allowed_token_ids=allowed, bad_words=words, bad_tokens=tokens)
        return replace(ordered, top_p=1.0, top_k=0, min_p=0.0, seed=0) if self.greedy else ordered

    def to_json(self) -> str:
        """Return the sampling parameters as JSON text. Equal parameters have equal texts.

        Parameters with their default values are omitted.
        """
        # New parameters do not change stored texts and keys. Therefore, defaults must never change
        changed = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        return json.dumps(changed, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the sampling parameters from the JSON text that `to_json` returns."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{name: _frozen(value) for name, value in values.items()})


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
