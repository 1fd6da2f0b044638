"""Sandboxed templates: the job's own, and the checkpoint's chat template."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]


class NullRendered(Exception):
    """Raised if a template of the job prints a null."""


def row_environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja's environment for the job's own templates, where a missing column or a printed null is an error."""
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, finalize=_no_null, keep_trailing_newline=True, optimized=False
    )
    environment.code_generator_class = _NothingEarly
    return environment


class _AtRuntime:
    # Without constants that are evaluated at compile time, `{{ 'a' * 10**10 }}` fails for rows, and not for the job
    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return node.data


class _NothingEarly(_AtRuntime, CodeGenerator):
    """A code generator of Jinja that evaluates nothing at compile time."""


class _Names(_AtRuntime, meta.TrackingCodeGenerator):
    """A code generator of Jinja that collects the variables of a template."""


def variables(environment: ImmutableSandboxedEnvironment, tree: nodes.Template) -> set[str]:
    """Return the names that a parsed template reads, without the names that the environment defines."""
    generator = _Names(environment)
    generator.optimizer = None
    generator.visit(tree)
    return set(generator.undeclared_identifiers) - set(environment.globals)


def _no_null(value: Any) -> Any:
    if value is None:
        raise NullRendered
    return value


class GenerationBlock(Extension):
    """The Jinja extension for `{% generation %}…{% endgeneration %}`, which marks answers for training.

    Here the block only prints its body.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as declared

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a `generation` block whose opening tag the parser has reached, and return its syntax tree."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class ChatTemplate:
    """A checkpoint's chat template, compiled once. It has the variables and filters that transformers provides.

    Args:
        source: The text of the template.
        named: The special tokens by name, such as bos_token.
        now: The time that `strftime_now` returns, the same for the whole job.
    """

    def __init__(self, source: str, named: dict[str, str], now: datetime) -> None:
        self.source = source
        # All variables except the messages. They are passed as a dict, since a name may be one of Jinja's parameters
        self._given: dict[str, Any] = {
            "tools": None, "documents": None, "add_generation_prompt": True, **named
        }  # fmt: skip
        self._environment = chat_environment(now)
        self._template = self._environment.from_string(source)

    def tree(self) -> nodes.Template:
        """Return the syntax tree of the template."""
        return self._environment.parse(self.source)

    def render(self, messages: Sequence[Message]) -> str:
        """Render a conversation, and return the text of the prompt up to the start of the assistant's answer."""
        return self._template.render({**self._given, "messages": messages})

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """Return a copy of the template with these arguments. They replace present arguments of the same names."""
        other = copy.copy(self)
        other._given = {**self._given, **arguments}
        return other


def chat_environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """Return Jinja's environment for checkpoints' chat templates.

    Args:
        now: The time that `strftime_now` returns.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols], optimized=False
    )
    environment.code_generator_class = _NothingEarly
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = now.strftime
    return environment


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
