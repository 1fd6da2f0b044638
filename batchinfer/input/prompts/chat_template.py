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
    """A template printed a null."""


def row_environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of the job's templates, in which a missing column or a printed null is an error."""
    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, finalize=_no_null, keep_trailing_newline=True, optimized=False
    )
    environment.code_generator_class = _NothingEarly
    return environment


class _AtRuntime:
    """Does not evaluate constants at compile time, so `{{ 'a' * 10**10 }}` fails for rows and not while compiling."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return node.data


class _NothingEarly(_AtRuntime, CodeGenerator):
    """A compiler of templates that evaluates nothing at compile time."""


class _Names(_AtRuntime, meta.TrackingCodeGenerator):
    """Collects the variables of a template."""


def variables(environment: ImmutableSandboxedEnvironment, tree: nodes.Template) -> set[str]:
    """Return the names that a template reads, without the environment's own."""
    generator = _Names(environment)
    generator.optimizer = None
    generator.visit(tree)
    return set(generator.undeclared_identifiers) - set(environment.globals)


def _no_null(value: Any) -> Any:
    if value is None:
        raise NullRendered
    return value


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks answers for training. Here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as declared

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class ChatTemplate:
    """A checkpoint's chat template, compiled once, with the names and filters of transformers.

    Args:
        source: The text of the template.
        named: The named tokens, such as bos_token.
        now: The time for `strftime_now`, the same for the whole job.
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
        """Return the parsed template."""
        return self._environment.parse(self.source)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt up to the start of the assistant's answer."""
        return self._template.render({**self._given, "messages": messages})

    def with_arguments(self, arguments: Mapping[str, Any]) -> ChatTemplate:
        """Return the same template with additional arguments."""
        other = copy.copy(self)
        other._given = {**self._given, **arguments}
        return other


def chat_environment(now: datetime) -> ImmutableSandboxedEnvironment:
    """Return the environment of a checkpoint's chat template; `now` is the time for `strftime_now`."""
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
