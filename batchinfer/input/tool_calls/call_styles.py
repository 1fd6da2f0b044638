"""The style of a checkpoint's calls is found: its chat template shows it where it prints earlier calls."""

from __future__ import annotations

import re

from batchinfer.core.tool_calls import CallStyle
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.input.tool_calls import formats
from batchinfer.input.tool_calls.bare_calls import PYTHON_TAG
from batchinfer.input.tool_calls.formats import HARMONY

# The special tokens of harmony, in the order in which `harmony` takes them
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
# A style is a checkpoint's if its template matches, before all styles below. GLM and Hunyuan write other things between
# the tags of Hermes: <arg_key>, a fence
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


def find_call_style(said: str, tokenizer: Tokenizer) -> CallStyle | None:
    """Return the style of this checkpoint's calls, as the job says it or as its chat template shows; None: calls are
    not to be told from text."""
    if said == "none":
        return None
    if said != "auto":
        return _style(said, tokenizer, of_all=True)
    template = tokenizer.chat_template or ""
    name = next((name for name, pattern in _SHOWN if re.search(pattern, template)), None)
    return None if name is None else _style(name, tokenizer)


def _style(name: str, tokenizer: Tokenizer, of_all: bool = False) -> CallStyle | None:
    specials = tokenizer.specials
    shown = tuple((specials[text], text) for text in _TOKENS[name] if text in specials)
    # channels are of tokens alone; some checkpoints lack one of those that end a message
    needed = {"<|start|>", "<|channel|>", "<|message|>"} if name == HARMONY else set()
    return CallStyle(name, shown, of_all) if needed <= specials.keys() else None
