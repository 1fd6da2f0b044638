"""Templates in a sandbox: the job's own, and the checkpoint's chat template with the names it expects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]


class NullRendered(Exception):
    """A template printed a null."""


def row_environment() -> ImmutableSandboxedEnvironment:
    """For the job's templates: a missing column or a printed null is an error, not an empty string."""
    # Nothing is computed while compiling, outside any row: not optimized, and a finalize that needs the context.
    return ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, finalize=_no_null, keep_trailing_newline=True, optimized=False
    )


@jinja2.pass_context
def _no_null(_: Context, value: Any) -> Any:
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
        self._named = named
        self._environment = _chat_environment(now)
        self._template = self._environment.from_string(source)

    def tree(self) -> nodes.Template:
        """The parsed template."""
        return self._environment.parse(self.source)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt, up to where the assistant's answer begins."""
        return self._template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._named
        )


def _chat_environment(now: datetime) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols], optimized=False
    )
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
