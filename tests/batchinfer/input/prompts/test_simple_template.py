"""Simple templates render as with Jinja. Other templates are rendered by Jinja."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.core.exact_json import read_float
from batchinfer.input.prompts.chat_template import row_environment
from batchinfer.input.prompts.simple_template import SimpleTemplate

PIECES = ["text ", "\n", "\r\n", " } ", "<b>&", "{# note #}", "{{ a }}", "{{b}}", "{{- a -}}", "{{ range }}"]
VALUES = st.one_of(
    st.text(max_size=5),
    st.integers(),
    st.booleans(),
    st.floats(),
    st.just(read_float("0.10000000000000000001")),
)


def simple(source: str) -> SimpleTemplate | None:
    return SimpleTemplate.of(row_environment().parse(source))


@given(st.lists(st.sampled_from(PIECES), max_size=6), VALUES, VALUES, VALUES)
def test_as_jinja_renders(pieces: list[str], a: Any, b: Any, other: Any) -> None:
    source, row = "".join(pieces), {"a": a, "b": b, "range": other}
    template = simple(source)
    assert template is not None, source
    text = template.render(row)
    if text is not None:
        assert text == row_environment().from_string(source).render(row)
    plain = all(type(value) in (str, int, bool, float) for value in row.values())
    assert text is not None or not plain


@pytest.mark.parametrize("row", [{}, {"a": None}, {"a": [1]}, {"a": {"b": 1}}])
def test_what_is_no_plain_value_is_left_to_jinja(row: dict[str, Any]) -> None:
    template = simple("x {{ a }}")
    assert template.render(row) is None


@pytest.mark.parametrize(
    "source",
    ["{{ a | upper }}", "{{ a.b }}", "{{ a ~ b }}", "{% if a %}x{% endif %}", "{{ row.a }}", "{{ row }}", "{{ self }}",
     "{{ 'x' }}", "{% set a = 1 %}{{ a }}", "{{ range(3) }}"],
)  # fmt: skip
def test_other_templates_are_left_to_jinja(source: str) -> None:
    assert simple(source) is None
