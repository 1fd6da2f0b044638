"""How a checkpoint marks its reasoning: the styles that are known, and whether a prompt has begun it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.reasoning import CLOSED, OPEN, Reasoning, ReasoningTokens
from batchinfer.core.request import TokenIds
from batchinfer.input.tokenizer.tokenizer import Tokenizer

Marks = Literal["auto", "none"] | tuple[str, str]  # what a job says: (begin, end)
Openings = NDArray[np.int8]  # how prompts end

# What checkpoints write around their reasoning. A style is a checkpoint's if its chat template names the text behind
# which an answer begins
STYLES = (
    # Qwen3, QwQ, DeepSeek-R1 and what was distilled from it, Nemotron, GLM, Phi-4, OLMo. Their templates close the
    # reasoning, where it is switched off, by "<think>\n\n</think>\n\n"
    Reasoning("<think>", "</think>", gap="\n\n"),
    # Magistral from 2507 on, Ministral: tokens of the vocabulary, named in the template's own system prompt
    Reasoning("[THINK]", "[/THINK]"),
    # gpt-oss: messages in channels, https://cookbook.openai.com/articles/openai-harmony
    Reasoning(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        answer="<|channel|>final<|message|>",
    ),
    # Seed-OSS
    Reasoning("<seed:think>", "</seed:think>"),
    # Granite 3.2 with `thinking`: plain text, in the words of its template's system prompt
    Reasoning("Here is my thought process:", "Here is my response:"),
)


_FINAL, _COMMENTARY = "final<|message|>", "commentary"  # how headers end that begin an answer, and a call


def find_reasoning(said: Marks, tokenizer: Tokenizer) -> Reasoning | None:
    """Return how this checkpoint marks its reasoning, as the job says it or as its chat template shows; None: it has no
    reasoning, or it is not to be told apart."""
    if said == "none":
        return None
    if said != "auto":
        known = (style for style in STYLES if (style.begin, style.end) == said)
        return _with_tokens(next(known, Reasoning(*said)), tokenizer)
    template = tokenizer.chat_template or ""
    shown = next((style for style in STYLES if style.closing in template), None)
    found = None if shown is None else _with_tokens(shown, tokenizer)
    # channels are of tokens alone
    return None if found is None or (found.answer and found.tokens is None) else found


def marks_before_calls(style: Reasoning, tokenizer: Tokenizer) -> ReasoningTokens | None:
    """Return the tokens around the reasoning before a call, where a call is a message on another channel than the
    answer; None: it stands where the answer would."""
    if style.tokens is None or _FINAL not in style.answer:
        return None
    end, answer = (
        tuple(tokenizer.rust.encode(text.replace(_FINAL, _COMMENTARY), add_special_tokens=False).ids)
        for text in (style.end, style.answer)
    )
    return style.tokens._replace(end=end, answer=answer)


def _with_tokens(style: Reasoning, tokenizer: Tokenizer) -> Reasoning:
    """Return the style with its tokens. Markers have tokens of their own where each begins and ends with an added
    token, at which a tokenizer cuts every text."""
    added = frozenset(tokenizer.rust.get_added_tokens_decoder())

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.rust.encode(text, add_special_tokens=False).ids)

    marks = ReasoningTokens(ids(style.begin), ids(style.end), ids(style.answer), ids(style.gap))
    if not all({mark[0], mark[-1]} <= added for mark in (marks.begin, marks.end, marks.answer) if mark):
        return style
    return replace(style, tokens=marks)


class PromptEnds:
    """Tells of prompts whether they have begun the reasoning. Text may stand behind a marker: an answer that the prompt
    begins. Another added token there, such as one that begins a turn, says that the marker was another answer's."""

    def __init__(self, tokens: ReasoningTokens, tokenizer: Tokenizer) -> None:
        self._tokens = tokens
        added = tokenizer.rust.get_added_tokens_decoder()
        marks = [number for number, token in added.items() if token.content.strip()]
        self._added = np.zeros(max(marks, default=-1) + 2, np.bool_)  # the last one stands for all others
        self._added[marks] = True

    def of(self, tokens: TokenIds, counts: TokenIds) -> Openings:
        """Return how each of some prompts ends, which lie end to end."""
        ends = np.cumsum(counts, dtype=np.int64)
        starts = ends - counts
        places = np.flatnonzero(self._added[np.minimum(tokens, len(self._added) - 1)])
        before = np.searchsorted(places, ends) - 1
        last = np.where(before >= 0, places[before] if len(places) else -1, -1)
        found = np.zeros(len(counts), np.int8)
        for mark, opening in (
            (self._tokens.begin, OPEN),
            (self._tokens.closing, CLOSED),
            (self._tokens.end, CLOSED),
        ):
            found[_stands(tokens, mark, last, starts)] = opening
        return found


def _stands(
    tokens: TokenIds, mark: tuple[int, ...], last: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Whether the marker ends at each of the `last` places, and begins no earlier than the prompt."""
    inside = last - len(mark) + 1 >= starts
    for back, token in enumerate(reversed(mark)):
        inside &= tokens[np.maximum(last - back, 0)] == token if len(tokens) else False
    return inside
