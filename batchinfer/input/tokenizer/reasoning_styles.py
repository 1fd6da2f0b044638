"""The known styles of marking reasoning, and the detection of prompts that begin it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.reasoning import CLOSED, OPEN, Reasoning, ReasoningTokens
from batchinfer.core.request import TokenIds
from batchinfer.input.tokenizer.tokenizer import Tokenizer

Marks = Literal["auto", "none"] | tuple[str, str]  # the job's setting; a tuple is (begin, end)
ReasoningOpenings = NDArray[np.int8]  # per prompt: NO_MARKER, OPEN or CLOSED

# The markers around reasoning. A checkpoint has a style if its chat template contains the marker that precedes answers
STYLES = (
    # Qwen3, QwQ, DeepSeek-R1 and models distilled from it, Nemotron, GLM, Phi-4, OLMo. If reasoning is switched off,
    # their templates end with "<think>\n\n</think>\n\n"
    Reasoning("<think>", "</think>", gap="\n\n"),
    # Magistral since 2507, Ministral: the markers are single tokens, and the template's system prompt names them
    Reasoning("[THINK]", "[/THINK]"),
    # gpt-oss: messages in channels, https://cookbook.openai.com/articles/openai-harmony
    Reasoning(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        answer="<|channel|>final<|message|>",
    ),
    # Seed-OSS
    Reasoning("<seed:think>", "</seed:think>"),
    # Granite 3.2 with `thinking`: plain text that the template's system prompt asks for
    Reasoning("Here is my thought process:", "Here is my response:"),
)


_FINAL, _COMMENTARY = "final<|message|>", "commentary"  # the ends of headers of an answer and of a tool call


def find_reasoning(setting: Marks, tokenizer: Tokenizer) -> Reasoning | None:
    """Find out by which markers the checkpoint's answers begin and end reasoning.

    Args:
        setting: "auto" to look for known markers in the chat template, "none", or the markers (begin, end).
        tokenizer: The tokenizer of the checkpoint.

    Returns:
        The markers. None for "none", or if the chat template has no known markers.
    """
    if setting == "none":
        return None
    if setting != "auto":
        matching = (style for style in STYLES if (style.begin, style.end) == setting)
        return _with_tokens(next(matching, Reasoning(*setting)), tokenizer)
    template = tokenizer.chat_template or ""
    shown = next((style for style in STYLES if style.closing in template), None)
    found = None if shown is None else _with_tokens(shown, tokenizer)
    # The channels of gpt-oss can only be recognised as tokens
    return None if found is None or (found.answer and found.tokens is None) else found


def marks_before_calls(style: Reasoning, tokenizer: Tokenizer) -> ReasoningTokens | None:
    """Return the markers of reasoning before a tool call, if they differ from the markers before a final answer.

    They differ for gpt-oss.

    Args:
        style: How the checkpoint marks its reasoning.
        tokenizer: The tokenizer of the checkpoint.

    Returns:
        None if the markers are the same.
    """
    if style.tokens is None or _FINAL not in style.answer:
        return None
    end, answer = (
        tuple(tokenizer.rust.encode(text.replace(_FINAL, _COMMENTARY), add_special_tokens=False).ids)
        for text in (style.end, style.answer)
    )
    return style.tokens._replace(end=end, answer=answer)


def _with_tokens(style: Reasoning, tokenizer: Tokenizer) -> Reasoning:
    # Tokenizers split every text at added tokens, so a marker between two added tokens always has the same tokens
    added = frozenset(tokenizer.rust.get_added_tokens_decoder())

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.rust.encode(text, add_special_tokens=False).ids)

    marks = ReasoningTokens(ids(style.begin), ids(style.end), ids(style.answer), ids(style.gap))
    if not all({mark[0], mark[-1]} <= added for mark in (marks.begin, marks.end, marks.answer) if mark):
        return style
    return replace(style, tokens=marks)


class PromptEnds:
    """Finds prompts that end within reasoning, or after it.

    Only the last added token of a prompt (a special token or a marker such as `<think>`) counts, since earlier markers
    belong to earlier answers.

    Args:
        tokens: The markers that begin and end reasoning.
        tokenizer: The tokenizer of the checkpoint.
    """

    def __init__(self, tokens: ReasoningTokens, tokenizer: Tokenizer) -> None:
        self._tokens = tokens
        added = tokenizer.rust.get_added_tokens_decoder()
        marks = [number for number, token in added.items() if token.content.strip()]
        self._added = np.zeros(max(marks, default=-1) + 2, np.bool_)  # the last entry is for all higher ids
        self._added[marks] = True

    def of(self, tokens: TokenIds, counts: TokenIds) -> ReasoningOpenings:
        """Return how each prompt ends: OPEN within reasoning, CLOSED after reasoning, else NO_MARKER. Shape (prompts,).

        Args:
            tokens: The concatenated prompts.
            counts: The number of tokens of each prompt, shape (prompts,).
        """
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
            found[_ends_with(tokens, mark, last, starts)] = opening
        return found


def _ends_with(
    tokens: TokenIds, mark: tuple[int, ...], last: NDArray[np.int64], starts: NDArray[np.int64]
) -> NDArray[np.bool_]:
    inside = last - len(mark) + 1 >= starts
    for back, token in enumerate(reversed(mark)):
        inside &= tokens[np.maximum(last - back, 0)] == token if len(tokens) else False
    return inside
