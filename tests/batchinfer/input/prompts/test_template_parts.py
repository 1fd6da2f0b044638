"""A template is divided only between lines that may change places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.input.prompts.template_parts import join_parts, template_parts

LONG = "Say in one sentence of at most twenty words what this is about, in English."


def split(source: str) -> list[str] | None:
    parts = template_parts(source)
    return None if parts is None else [part.source for part in parts]


@pytest.mark.parametrize(("source", "parts"), [
    ("Greet {{ text }}", ["Greet {{ text }}"]),
    ("{{ text }}\n\nAnswer briefly.\nIn English.", ["{{ text }}", "Answer briefly.\nIn English."]),
    ("Title:\n{{ t }}\nText: {{ b }}", ["Title:\n{{ t }}", "Text: {{ b }}"]),
    ("<doc>\n{{ d }}\n</doc>\nJudge it.", ["<doc>\n{{ d }}\n</doc>", "Judge it."]),
    ("{% for x in xs %}\n- {{ x }}\n{% endfor %}\nSum it up.", ["{% for x in xs %}\n- {{ x }}\n{% endfor %}",
        "Sum it up."]),
    ("{% if a %}\n\n{{ a }}\n{% else %}\nnothing\n{% endif %}\n{{ b }}",
        ["{% if a %}\n\n{{ a }}\n{% else %}\nnothing\n{% endif %}", "{{ b }}"]),
    ("{{ a\n}} and\n{{ b }}", ["{{ a\n}} and", "{{ b }}"]),
    ("{{ a }}\nAnswer:", ["{{ a }}", "Answer:"]),
    (f"Text: {{{{ a }}}}. {LONG}", ["Text: {{ a }}.", LONG]),
    (f"{{{{ a }}}} and {{{{ b }}}} {LONG}\n{{{{ c }}}}", ["{{ a }} and {{ b }}", LONG, "{{ c }}"]),
    (f"{{{{ a }}}} {LONG} {{{{ b }}}}", [f"{{{{ a }}}} {LONG} {{{{ b }}}}"]),
    ("{{ a }} and so on", ["{{ a }} and so on"]),
])  # fmt: skip
def test_parts(source: str, parts: list[str]) -> None:
    assert split(source) == parts


@pytest.mark.parametrize("source", [
    "{% set a = 1 %}\n{{ a }}",
    "{{- a }}\nb",
    "{% macro m() %}\n{% endmacro %}",
    "{{ a",
    "{%+ if a %}\n{% endif %}",
])  # fmt: skip
def test_templates_with_unmovable_lines_are_not_divided(source: str) -> None:
    assert template_parts(source) is None


def test_parts_have_their_columns_lines_and_labels() -> None:
    parts = template_parts("Be kind.\n\n{{ a }} of {{ b }}\nAnswer:")
    assert [(part.columns, part.first_line, part.last_line, part.is_label) for part in parts] == [
        ((), 1, 1, False),
        (("a", "b"), 3, 3, False),
        ((), 4, 4, True),
    ]


@given(st.lists(st.sampled_from(["{{ a }}", "Some words.", "Label:", "B: {{ b }}"]), min_size=1, max_size=9))
def test_the_parts_in_order_are_the_template(lines: list[str]) -> None:
    source = "\n".join(lines)
    parts = template_parts(source)
    assert join_parts(parts, source) == source
    starts = [part.first_line for part in parts]
    assert all(
        source.split("\n")[start - 1] == part.source.split("\n")[0]
        for start, part in zip(starts, parts, strict=True)
    )
