"""The chat-template shortcut returns exactly the template's text, or is not used."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.input.prompts.chat_shapes import ChatShapes
from batchinfer.input.prompts.chat_template import ChatTemplate, Message
from tests.batchinfer.store.index.ingest_kit import CHATML
from tests.examples import examples

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = """
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}
    {%- endif %}
    {%- if message.role == 'user' and content.startswith('<tool_response>') and content.endswith('</tool_response>') %}
        {{- 'TOOL' + content }}
    {%- elif message.role == 'assistant' %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{{ '<start_of_turn>' + m['role'] + '\n' + (first if loop.first else '') }}"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
)
EXACT = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "gemma": GEMMA}
ODD = {
    "upper": "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}",
    "length": "{% for m in messages %}{{ m['content'] if m['content']|length > 3 else 'short' }}{% endfor %}",
    "slice": "{% for m in messages %}{{ m['content'][:2] }}{% endfor %}",
    "looks into joined text": "{% for m in messages %}{% set c = 'x' + m['content'] %}"
    "{% if c.startswith('x ') %}A{% endif %}{{ c }}{% endfor %}",
    "tilde": "{% for m in messages %}{% set c = 'x' ~ m['content'] %}{% if ' ' in c %}A{% endif %}{{ c }}{% endfor %}",
    "captured": "{% for m in messages %}{% set c %}{{ m['content'] }}{% endset %}"
    "{% if ' ' in c %}A{% endif %}{{ c }}{% endfor %}",
    "compares": "{{ 'same' if messages[0]['content'] == messages[-1]['content'] else 'differ' }}",
    "json": "{{ messages | tojson }}",
    "replaced": "{{ messages[0].content.replace('a', 'b') }}",
    "percent": "{{ '%5s' % messages[0].content }}",
    "sorted": "{{ messages | map(attribute='content') | sort | join('') }}",
    "equals": "{{ 'A' if messages[0].content == 'a' else messages[0].content }}",
    "empty": "{{ messages[0].content if messages[0].content else 'nothing' }}",
}
THINKING = ["</think>x", "<think>\ny\n</think>\n\nz", "<tool_response>q</tool_response>"]
CONTENT = st.text(alphabet="ab{}%<>/&\n \t'é漢🙂\u2028", max_size=12) | st.sampled_from(
    ["", "a", *THINKING, "{{ a }}", "\ue0f20\ue0f3"]
)
ROLES = st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=4)


def chat(roles: list[str], contents: list[str]) -> list[Message]:
    return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, datetime(2026, 1, 2))


@pytest.mark.parametrize("name", [*EXACT, *ODD])
@settings(max_examples=examples(8, 100))
@given(data=st.data(), roles=ROLES, system=st.booleans())
def test_text_is_the_templates_own(name: str, data: st.DataObject, roles: list[str], system: bool) -> None:
    source = template({**EXACT, **ODD}[name])
    shapes = ChatShapes(source)
    roles = ["system"] * system + roles
    for _ in range(3):
        messages = chat(roles, [data.draw(CONTENT) for _ in roles])
        assert shapes.render(messages) == source.render(messages)


@pytest.mark.parametrize("name", EXACT)
def test_the_shortcut_is_taken_for_common_templates(name: str) -> None:
    shapes = ChatShapes(template(EXACT[name]))
    for number in range(5):
        shapes.render(chat(["system", "user"], ["Be brief.", f" question {number}\n"]))
    assert shapes.shortcuts == 5


def test_templates_can_be_stopped_from_within() -> None:
    import jinja2

    source = template("{{ raise_exception('no system message') }}")
    with pytest.raises(jinja2.TemplateError, match="no system message"):
        ChatShapes(source).render(chat(["user"], ["x"]))


def test_the_names_of_transformers() -> None:
    source = template(
        "{% generation %}{{ strftime_now('%Y-%m-%d') }}{% endgeneration %}{{ {'a': '<é>'} | tojson }}"
        "{% for m in messages %}{% break %}{% endfor %}{{ bos_token }}{{ tools is none }}"
    )
    assert source.render([]) == '2026-01-02{"a": "<é>"}<s>True'
