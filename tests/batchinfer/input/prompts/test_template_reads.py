"""The names that a template reads, compared with Jinja's analysis."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import jinja2
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.input.prompts.arguments.template_arguments import arguments_read
from batchinfer.input.prompts.chat_template import ChatTemplate
from tests.examples import examples

NOW = datetime(2026, 1, 1)
NAME = st.sampled_from("xyz")
EXPRESSIONS = ["(x is defined)", "'a'", "(x ~ y)", "[x, 'b']", "f(x)", "(z | default('d'))", "(x or [2])"]
EXPRESSION = NAME | st.sampled_from(EXPRESSIONS)
PLAIN = st.one_of(
    EXPRESSION.map("{{{{ {} }}}}".format),
    st.tuples(NAME, EXPRESSION).map(lambda one: f"{{% set {one[0]} = {one[1]} %}}"),
    st.tuples(NAME, NAME, EXPRESSION).map(lambda one: "{{% set {}, {} = {}, 1 %}}".format(*one)),
)
SHAPES = (
    "{{% if {e} %}}{a}{{% else %}}{b}{{% endif %}}",
    "{{% if {e} %}}{a}{{% elif {f} %}}{b}{{% endif %}}",
    "{{% for {n} in {e} %}}{a}{{% else %}}{b}{{% endfor %}}",
    "{{% for {n} in {e} if {f} %}}{a}{{% endfor %}}{b}",
    "{{% macro f({n}='', w={e}) %}}{a}{{% endmacro %}}{b}",
    "{{% set {n} %}}{a}{{% endset %}}{b}",
    "{{% with {n} = {e} %}}{a}{{% endwith %}}{b}",
    "{{% call f({e}) %}}{a}{{% endcall %}}{b}",
    "{{% generation %}}{a}{{% endgeneration %}}{b}",
    "{{% filter upper %}}{a}{{% endfilter %}}{b}",
    "{a}{b}",
)
SOURCE = st.recursive(
    PLAIN,
    lambda inner: st.builds(
        lambda shape, **parts: shape.format(**parts),
        st.sampled_from(SHAPES), n=NAME, e=EXPRESSION, f=EXPRESSION, a=inner, b=inner,
    ),
    max_leaves=10,
)  # fmt: skip


@settings(max_examples=examples(40, 3000), deadline=None)
@given(source=SOURCE, value=st.sampled_from(["v", 1, None]))
def test_a_name_that_is_not_read_changes_nothing(source: str, value: Any) -> None:
    template = ChatTemplate(f"{{% macro f(a='') %}}m{{{{ a }}}}{{% endmacro %}}{source}", {}, NOW)
    plain = rendered(template)
    for name in {"x", "y", "z", "w"} - arguments_read(template.source):
        assert rendered(template.with_arguments({name: value})) == plain


def rendered(template: ChatTemplate) -> str:
    try:
        return template.render([])
    except (TypeError, RecursionError, jinja2.TemplateError) as error:
        return type(error).__name__
