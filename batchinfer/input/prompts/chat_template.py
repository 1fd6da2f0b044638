"""Templates in a sandbox: the job's own, and the checkpoint's chat template with the names it expects."""

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
    """A template printed a null."""


def row_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of the job's templates: a missing column or a printed null is an error, not an empty
    string."""
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, finalize=_no_null, keep_trailing_newline=True, optimized=False
    )
    environment.code_generator_class = _NothingEarly
    return environment


class _AtRuntime:
    """Computes nothing while compiling: `{{ 'a' * 10**10 }}` is to cost rows, not the process that compiles it."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return node.data


class _NothingEarly(_AtRuntime, CodeGenerator):
    """A compiler of templates that computes nothing before a row is rendered."""


class _Names(_AtRuntime, meta.TrackingCodeGenerator):
    """Collects the variables of a template."""


def variables(environment: ImmutableSandboxedEnvironment, tree: nodes.Template) -> set[str]:
    """The names that a template reads from outside, without the environment's own."""
    generator = _Names(environment)
    generator.optimizer = None
    generator.visit(tree)
    return set(generator.undeclared_identifiers) - set(environment.globals)


def _no_null(value: Any) -> Any:
    if value is None:
        raise NullRendered
    return value


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as declared

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class ChatTemplate:
    """A checkpoint's chat template, compiled once; the same names and filters as in transformers.

    `now` is what `strftime_now` tells: one moment for a whole job.
    """

    def __init__(self, source: str, named: dict[str, str], now: datetime) -> None:
        self.source = source
        # What the template reads by name, messages aside; a dict, as Jinja's own parameters may have any name
        self._given: dict[str, Any] = {
            "tools": None, "documents": None, "add_generation_prompt": True, **named
        }  # fmt: skip
        self._environment = chat_environment(now)
        self._template = self._environment.from_string(source)

    def tree(self) -> nodes.Template:
        """The parsed template."""
        return self._environment.parse(self.source)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt, up to where the assistant's answer begins."""
        return self._template.render({**self._given, "messages": messages})

    def told(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """The same template with these arguments besides."""
        other = copy.copy(self)
        other._given = {**self._given, **arguments}
        return other


def chat_environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """Return the environment of a checkpoint's chat template, with the names and filters that it expects. `now`: see
    ChatTemplate."""
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
