"""Tiny reasoning checkpoints: special tokens and chat templates shaped like published families.

The templates keep everything about reasoning: how it opens and closes, is dropped from earlier turns, and is
named.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import make_checkpoint, make_family_tokenizer

QWEN3 = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}
        {%- set content = message.content %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
DEEPSEEK_R1 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
    {%- else %}{{- message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""
GPT_OSS = """\
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.thinking and not add_generation_prompt %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
MAGISTRAL = """\
{%- set default_system_message = 'First draft your thinking process. Your thinking process must follow the template
 below:[THINK]Your thoughts.[/THINK]Here, provide a self-contained response.' %}
{{- bos_token }}
{%- if messages[0].role != 'system' %}
    {{- '[SYSTEM_PROMPT]' + default_system_message + '[/SYSTEM_PROMPT]' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- else %}{{- message.content + eos_token }}{%- endif %}
{%- endfor %}"""
GRANITE = """\
{%- set system_message = 'You are Granite.' %}
{%- if thinking %}
    {%- set system_message = system_message + " Write your thoughts after 'Here is my thought process:' and write your
 response after 'Here is my response:' for each user query." %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- for message in messages %}
    {{- '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""
NEMOTRON = """\
{%- set ns = namespace(thinks=true) %}
{%- for message in messages %}
    {%- if '/no_think' in message.content %}{%- set ns.thinks = false %}{%- endif %}
    {{- '<SPECIAL_11>' + message.role + '\\n' + message.content.split('</think>')[-1] + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<SPECIAL_11>Assistant\\n' + ('<think>\\n' if ns.thinks else '<think></think>') }}
{%- endif %}"""


@dataclass(frozen=True)
class ReasoningFamily:
    """A family's chat template and added tokens.

    Attributes:
        special: special tokens, which texts omit.
    """

    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()


THINK = ("<think>", "</think>")
REASONING_FAMILIES = {
    "qwen3": ReasoningFamily(QWEN3, (), THINK),
    "deepseek-r1": ReasoningFamily(
        DEEPSEEK_R1, ("<｜end▁of▁sentence｜>",), ("<｜User｜>", "<｜Assistant｜>", *THINK)
    ),
    "gpt-oss": ReasoningFamily(
        GPT_OSS, ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|constrain|>")
    ),
    "magistral": ReasoningFamily(
        MAGISTRAL, ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[THINK]", "[/THINK]")
    ),
    "granite": ReasoningFamily(GRANITE, ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")),
    "nemotron": ReasoningFamily(NEMOTRON, ("<SPECIAL_11>",), THINK),
}


def make_reasoning_tokenizer(folder: Path, name: str) -> PreTrainedTokenizerFast:
    """Save the byte-level tokenizer with the family's tokens and template."""
    family = REASONING_FAMILIES[name]
    return make_family_tokenizer(folder, family.template, family.special, family.plain)


def make_reasoning_model(folder: Path, name: str, seed: int = 0, **options: Any) -> PreTrainedTokenizerFast:
    """Save a tiny model that samples the end of its reasoning every few dozen tokens, with its tokenizer."""
    fast = make_reasoning_tokenizer(folder, name)
    model = make_checkpoint(folder, "qwen3", vocab=len(fast), seed=seed, **options)
    ends = [token for text in ("</think>", "[/THINK]") if (token := fast.get_vocab().get(text)) is not None]
    with torch.no_grad():
        model.get_output_embeddings().weight[ends] *= 1.7
    model.save_pretrained(folder)
    return fast
