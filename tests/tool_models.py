"""Tiny checkpoints that call tools: special tokens and chat templates shaped like published families.

The templates keep everything about tools: their descriptions, the syntax of calls, and the start of an
answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from tests.checkpoints import make_checkpoint, make_family_tokenizer

_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
_EACH = "{% for call in m.tool_calls or [] %}"
QWEN3 = (
    _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _EACH
    + '<tool_call>\n{"name": "'
    '{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
QWEN3_CODER = (
    _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _EACH
    + "<tool_call>\n<function="
    "{{ call.function.name }}>\n{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n"
    "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
LLAMA3 = (
    '{{ bos_token }}{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of argument '
    "name and its value}. {% endif %}" + _TOOLS + "{% for m in messages %}<|start_header_id|>{{ m.role }}"
    "<|end_header_id|>\n\n{{ m.content }}" + _EACH + '{"name": "{{ call.function.name }}", "parameters": '
    "{{ call.function.arguments | tojson }}}{% endfor %}<|eot_id|>{% endfor %}<|start_header_id|>assistant"
    "<|end_header_id|>\n\n"
)
MISTRAL_V3 = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}[INST]{{ m.content }}[/INST]{% if m.tool_calls %}[TOOL_CALLS] ["
    + _EACH
    + '{"name": "'
    '{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% endfor %}]{% endif %}{% endfor %}"
)
MISTRAL_V11 = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}[INST]{{ m.content }}[/INST]"
    + _EACH
    + "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]"
    "{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
GPT_OSS = (
    "<|start|>system<|message|># Valid channels: analysis, commentary, final.{% if tools %}\nCalls to these tools must "
    "go to the commentary channel: 'functions'.{% endif %}<|end|>"
    + _TOOLS
    + "{% for m in messages %}<|start|>"
    "{{ m.role }}{% if m.tool_calls %} to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>{% else %}<|channel|>final<|message|>"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}<|start|>assistant"
)
GPT_OSS = GPT_OSS.replace("{{ m.content }}<|end|>", "{{ m.content }}{# analysis<|message|> #}<|end|>")
_CALL = "<｜tool▁call▁begin｜>"
DEEPSEEK_V3 = (
    "{{ bos_token }}" + _TOOLS + "{% for m in messages %}<｜User｜>{{ m.content }}{% if m.tool_calls %}"
    "<｜tool▁calls▁begin｜>" + _EACH + _CALL + "function<｜tool▁sep｜>{{ call.function.name }}\n```json\n"
    "{{ call.function.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
    "{% endfor %}<｜Assistant｜>"
)
DEEPSEEK_V31 = DEEPSEEK_V3.replace(
    "function<｜tool▁sep｜>{{ call.function.name }}\n```json\n", "{{ call.function.name }}<｜tool▁sep｜>"
).replace("\n```<", "<")
GRANITE = (
    "{% if tools %}When a tool is required, respond with <|tool_call|> followed by a JSON list of tools used."
    "{% endif %}"
    + _TOOLS
    + "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "<|end_of_text|>\n{% endfor %}<|start_of_role|>assistant<|end_of_role|>"
)


@dataclass(frozen=True)
class ToolFamily:
    """A family's chat template and added tokens.

    Attributes:
        special: special tokens, which texts omit.
        style: style of its calls.
    """

    style: str
    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()


_QWEN = (("<|im_start|>", "<|im_end|>"), ("<think>", "</think>", "<tool_call>", "</tool_call>"))
_INST = ("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]")
_SEEK = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _CALL, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("<｜User｜>", "<｜Assistant｜>"),
)
TOOL_FAMILIES = {
    "qwen3": ToolFamily("hermes", QWEN3, *_QWEN),
    "qwen3-coder": ToolFamily("qwen3-coder", QWEN3_CODER, *_QWEN),
    "llama3": ToolFamily(
        "llama3", LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
    ),
    "mistral-v3": ToolFamily("mistral", MISTRAL_V3, _INST),
    "mistral-v11": ToolFamily("mistral", MISTRAL_V11, (*_INST, "[CALL_ID]", "[ARGS]")),
    "gpt-oss": ToolFamily(
        "harmony",
        GPT_OSS,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|constrain|>", "<|call|>"),
    ),
    "deepseek-v3": ToolFamily("deepseek", DEEPSEEK_V3, (), _SEEK),
    "deepseek-v3.1": ToolFamily("deepseek", DEEPSEEK_V31, (), _SEEK),
    "granite": ToolFamily(
        "granite", GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>")
    ),
}


def make_tool_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerFast:
    """Save the byte-level tokenizer with the family's tokens and template."""
    family = TOOL_FAMILIES[name]
    return make_family_tokenizer(folder, family.template, family.special, family.plain)


def make_tool_model(folder: Path, name: str, seed: int = 0, **options: Any) -> PreTrainedTokenizerFast:
    """Save a tiny random model with the family's tokenizer."""
    fast = make_tool_tokenizer(folder, name)
    make_checkpoint(
        folder, "qwen3", vocab=len(fast), seed=seed, max_position_embeddings=2048, **options
    ).save_pretrained(folder)
    return fast


def written_call(name: str, tool: str, arguments: str) -> str:
    """Return a call as the family's models write it."""
    style = TOOL_FAMILIES[name].style
    if name == "mistral-v11":
        return f"[TOOL_CALLS]{tool}[CALL_ID]a1b2c3d4e[ARGS]{arguments}"
    if name == "deepseek-v3":
        return f"{_CALL}function<｜tool▁sep｜>{tool}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
    if name == "deepseek-v3.1":
        return f"{_CALL}{tool}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"
    key = "parameters" if style == "llama3" else "arguments"
    call = f'{{"name": "{tool}", "{key}": {arguments}}}'
    return f"<tool_call>\n{call}\n</tool_call>" if style == "hermes" else call


def written_calls(name: str, calls: list[tuple[str, str]]) -> str:
    """Return several calls as the family's models write them, in order."""
    each = [written_call(name, *call) for call in calls]
    style = TOOL_FAMILIES[name].style
    if style == "deepseek":
        return f"<｜tool▁calls▁begin｜>{chr(10).join(each)}<｜tool▁calls▁end｜>"
    if name == "mistral-v3":
        return f"[TOOL_CALLS] [{', '.join(each)}]"
    if style == "granite":
        return f"<|tool_call|>[{', '.join(each)}]"
    if style == "llama3":
        return "; ".join(each)
    return ("\n" if style == "hermes" else "").join(each)
