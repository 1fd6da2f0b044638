"""Chat templates shaped like published ones, with the same arguments and the same use of them.

They are rewritten and shortened: prompts differ from those the models were trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.reasoning_models import DEEPSEEK_R1, MAGISTRAL, QWEN3

_OPEN = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"


@dataclass(frozen=True)
class Family:
    """A template, its arguments, and some sets of values."""

    source: str
    reads: frozenset[str] = frozenset()
    told: tuple[dict[str, Any], ...] = field(default=({},))


DEEPSEEK_V31 = """
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{% set ns = namespace(is_first=false, system_prompt='', is_first_sp=true, is_last_user=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
    {%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}
    {% set ns.is_first_sp = false %}
    {%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}
{%- endif %}{%- endfor %}
{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{%- set ns.is_last_user = true -%}{{ '<User>' + message['content'] }}{%- endif %}
    {%- if message['role'] == 'assistant' %}{%- set ns.is_last_user = false -%}
        {{ '<Assistant></think>' + message['content'] + '<eos>' }}{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt and ns.is_last_user %}{{ '<Assistant>' }}
    {%- if not thinking %}{{ '</think>' }}{%- else %}{{ '<think>' }}{%- endif %}
{% endif %}
"""
GPT_OSS = """
{%- macro render_builtin_tools(browser, python) %}
    {%- if browser %}{{- "## browser\\n" }}{%- endif %}{%- if python %}{{- "## python\\n" }}{%- endif %}
{%- endmacro %}
{%- macro build_system_message() -%}
    {%- if model_identity is not defined %}
        {%- set model_identity = "You are ChatGPT, a large language model trained by OpenAI." %}
    {%- endif %}
    {{- model_identity + "\\nKnowledge cutoff: 2024-06\\nCurrent date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
    {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
    {{- "Reasoning: " + reasoning_effort + "\\n\\n" }}
    {%- if builtin_tools %}
        {{- "# Tools\\n\\n" }}{%- set available = namespace(browser=false, python=false) %}
        {%- for tool in builtin_tools %}
            {%- if tool == "browser" %}{%- set available.browser = true %}
            {%- elif tool == "python" %}{%- set available.python = true %}{%- endif %}
        {%- endfor %}
        {{- render_builtin_tools(available.browser, available.python) }}
    {%- endif -%}
    {{- "# Valid channels: analysis, commentary, final." }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" + build_system_message() + "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
    {%- set developer_message = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set developer_message = "" %}{%- set loop_messages = messages %}
{%- endif %}
{%- if developer_message or tools %}{{- "<|start|>developer<|message|>" + developer_message + "<|end|>" }}{%- endif %}
{%- for message in loop_messages -%}
    {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
GRANITE33 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = "Today's Date: " + strftime_now('%B %d, %Y') + ".\\nYou are Granite." %}
    {%- if available_tools and documents %}{%- set system_message = system_message + " Tools and documents." %}
    {%- elif available_tools %}{%- set system_message = system_message + " Tools." %}
    {%- elif documents %}{%- set system_message = system_message + " Use the facts in the documents." %}
    {%- elif thinking %}{%- set system_message = system_message + " Think in <think></think>." %}{%- endif %}
    {%- if 'citations' in controls and documents %}{%- set system_message = system_message + ' Cite.' %}{%- endif %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system_message + '<|end_of_text|>\\n' }}
{%- if documents %}{%- for document in documents %}
    {{- '<|start_of_role|>document ' + (document.doc_id | string) + '<|end_of_role|>\\n' + document['text'] }}
{%- endfor %}{%- endif %}
{%- for message in loop_messages %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}{%- if controls %}{{- ' ' + controls | tojson() }}{%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""
NEMOTRON3 = (
    "{%- set enable_thinking = enable_thinking if enable_thinking is defined else True %}"
    "{%- set truncate_history_thinking = truncate_history_thinking if truncate_history_thinking is defined else True %}"
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and truncate_history_thinking and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1] %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}"
    f"{_OPEN}{{%- if enable_thinking %}}{{{{- '<think>\\n' }}}}{{%- else %}}{{{{- '<think></think>' }}}}{{%- endif %}}"
    "{%- endif %}"
)


def _family(source: str, *told: dict[str, Any], reads: str = "") -> Family:
    return Family(source, frozenset(reads.split()), ({}, *told))


_THINKING = ({"enable_thinking": False}, {"enable_thinking": True})
FAMILIES = {
    "qwen3": _family(QWEN3, *_THINKING, {"enable_thinking": 0}, reads="enable_thinking"),
    "deepseek-v3.1": _family(DEEPSEEK_V31, {"thinking": True}, {"thinking": False}, reads="thinking"),
    "deepseek-r1": _family(DEEPSEEK_R1),
    "gpt-oss": _family(
        GPT_OSS,
        {"reasoning_effort": "high"},
        {"builtin_tools": ["python", "browser"], "model_identity": "You are Ä."},
        reads="reasoning_effort builtin_tools model_identity",
    ),
    "magistral": _family(MAGISTRAL),
    "granite-3.3": _family(
        GRANITE33,
        {"thinking": True},
        {"documents": [{"doc_id": 1, "text": "one"}], "controls": {"citations": True, "length": "short"}},
        {"documents": [{"doc_id": "a", "text": "Ä"}], "available_tools": [{"name": "f"}]},
        reads="thinking documents controls available_tools",
    ),
    "nemotron-3": _family(
        NEMOTRON3, *_THINKING, {"truncate_history_thinking": False}, reads="enable_thinking truncate_history_thinking"
    ),
}  # fmt: skip
