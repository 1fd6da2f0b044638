"""Six families as published checkpoints define them: their reasoning markers, and the start of their prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchinfer.core.reasoning import CLOSED, NO_MARKER, OPEN
from batchinfer.input.tokenizer.reasoning_styles import PromptEnds, find_reasoning
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from tests.checkpoints import make_tokenizer
from tests.reasoning_models import REASONING_FAMILIES, make_reasoning_tokenizer

MARKS = {
    "qwen3": ("<think>", "</think>"),
    "deepseek-r1": ("<think>", "</think>"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    "magistral": ("[THINK]", "[/THINK]"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "nemotron": ("<think>", "</think>"),
}
ASKED = [{"role": "user", "content": "How many <think> are in it?"}]
BEFORE = [*ASKED, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTwo", "thinking": "hm"}, *ASKED]
OFF = [{"role": "user", "content": "Two? /no_think"}]


@pytest.mark.parametrize("name", REASONING_FAMILIES)
def test_its_markers_are_found(name: str, tmp_path: Path) -> None:
    fast = make_reasoning_tokenizer(tmp_path, name)
    found = find_reasoning("auto", Tokenizer.load(tmp_path))
    assert (found.begin, found.end) == MARKS[name]
    if name == "granite":
        assert found.tokens is None  # its markers are ordinary text
    else:
        assert [fast.decode(ids) for ids in found.tokens[:2]] == list(MARKS[name])


def test_the_job_overrides_the_template(tmp_path: Path) -> None:
    fast = make_reasoning_tokenizer(tmp_path, "qwen3")
    tokenizer = Tokenizer.load(tmp_path)
    assert find_reasoning("none", tokenizer) is None
    named = find_reasoning(("<|im_start|>", "<|pad|>"), tokenizer)
    assert fast.decode(named.tokens.end) == "<|pad|>"
    written = find_reasoning(("(", ")"), tokenizer)
    assert written.tokens is None


def test_a_checkpoint_that_names_no_reasoning_has_none(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    assert find_reasoning("auto", Tokenizer.load(tmp_path)) is None


@pytest.mark.parametrize(("name", "messages", "arguments", "ends"), [
    ("qwen3", ASKED, {}, NO_MARKER),
    ("qwen3", BEFORE, {}, NO_MARKER),
    ("qwen3", ASKED, {"enable_thinking": False}, CLOSED),
    ("deepseek-r1", BEFORE, {}, OPEN),
    ("gpt-oss", BEFORE, {}, NO_MARKER),
    ("magistral", ASKED, {}, NO_MARKER),
    ("magistral", BEFORE, {}, NO_MARKER),
    ("nemotron", ASKED, {}, OPEN),
    ("nemotron", OFF, {}, CLOSED),
])  # fmt: skip
def test_a_prompt_says_whether_it_has_begun_the_reasoning(
    name: str, messages: list[dict[str, str]], arguments: dict[str, Any], ends: int, tmp_path: Path
) -> None:
    """Includes answers begun after the marker, with any text around it."""
    fast = make_reasoning_tokenizer(tmp_path, name)
    tokenizer = Tokenizer.load(tmp_path)
    reasoning = find_reasoning("auto", tokenizer)
    text = fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **arguments)
    begun = "So, first of" if ends else ""
    prompts = [
        np.array(tokenizer.rust.encode(one, add_special_tokens=False).ids, np.int32)
        for one in (text, "a", text + begun, reasoning.begin, reasoning.end, "b")
    ]
    counts = np.array([len(prompt) for prompt in prompts], np.int32)
    found = PromptEnds(reasoning.tokens, tokenizer).of(np.concatenate(prompts), counts)
    assert found.tolist() == [ends, NO_MARKER, ends, OPEN, CLOSED, NO_MARKER]
