"""Detects the syntax of a checkpoint's tool calls from its chat template, which writes earlier calls into prompts."""

from __future__ import annotations

import re

from batchinfer.core.tool_calls import CallStyle
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.input.tool_calls import formats
from batchinfer.input.tool_calls.bare_calls import PYTHON_TAG
from batchinfer.input.tool_calls.formats import HARMONY

# The special tokens of harmony
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_TOKENS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "granite": ("<|tool_call|>", "<tool_call>", "</tool_call>"),
    "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    "mistral": (formats.TOOL_CALLS, formats.CALL_ID, formats.ARGS),
    "llama3": (PYTHON_TAG,),
    "deepseek": (
        *(formats.CALLS_BEGIN, formats.CALLS_END, formats.CALL_BEGIN),
        *(formats.CALL_SEP, formats.CALL_END),
    ),
    "qwen3-coder": ("<tool_call>", "</tool_call>"),
    HARMONY: MARKS,
}
# The first style whose pattern matches the chat template counts. GLM and Hunyuan use the tags of Hermes with another
# content, <arg_key> or a code fence, and are not supported
_SHOWN: tuple[tuple[str, str], ...] = (
    (HARMONY, r"(?s)<\|channel\|>.*to=functions\.|to=functions\..*<\|channel\|>"),
    ("deepseek", re.escape(formats.CALL_BEGIN)),
    ("mistral", re.escape(formats.TOOL_CALLS)),
    ("qwen3-coder", r"(?s)<tool_call>(?=.*<function=)(?=.*<parameter=)"),
    ("nemotron", r"<TOOLCALL>"),
    ("granite", r"<\|tool_call\|>(?!.*<\|/tool_call\|>)|<tool_call>(?:\\n|\s)*\["),
    ("hermes", r"(?s)\A(?!.*(?:<arg_key>|```json)).*<tool_call>"),
    ("llama3", r"\"name\": function name, \"parameters\":|<\|python_tag\|>"),
)


def find_call_style(setting: str, tokenizer: Tokenizer) -> CallStyle | None:
    """Find out in which syntax the checkpoint's answers write tool calls.

    Args:
        setting: The name of a style, "auto" to recognise it by the chat template, or "none".
        tokenizer: The tokenizer of the checkpoint.

    Returns:
        None for "none", or if the chat template shows no known style. Calls then stay in the text.
    """
    if setting == "none":
        return None
    if setting != "auto":
        return _style(setting, tokenizer, of_all=True)
    template = tokenizer.chat_template or ""
    name = next((name for name, pattern in _SHOWN if re.search(pattern, template)), None)
    return None if name is None else _style(name, tokenizer)


def _style(name: str, tokenizer: Tokenizer, of_all: bool = False) -> CallStyle | None:
    specials = tokenizer.specials
    shown = tuple((specials[text], text) for text in _TOKENS[name] if text in specials)
    # Harmony can only be parsed if these are tokens; the tokens that end a message are optional
    needed = {"<|start|>", "<|channel|>", "<|message|>"} if name == HARMONY else set()
    return CallStyle(name, shown, of_all) if needed <= specials.keys() else None
