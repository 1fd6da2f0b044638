"""Collects the arguments of a chat template from the job and its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from batchinfer.core.plain_json import NotPlain, TooLarge, plain_json
from batchinfer.core.tools import BadTools, check_tools
from batchinfer.input.json_text import parse_value
from batchinfer.input.openai import CHOICE, DOCUMENTS, EFFORT, KWARGS, TOOLS
from batchinfer.input.prompts.arguments.names_read import names_read
from batchinfer.input.prompts.chat_template import chat_environment
from batchinfer.input.rows import RowProblem, Values, kind_of
from batchinfer.input.tokenizer.tokenizer import NAMED_TOKENS

Arguments = Mapping[str, Any]
_GENERATION_PROMPT = "add_generation_prompt"
_GIVEN = frozenset({"messages", TOOLS, _GENERATION_PROMPT, *NAMED_TOKENS})
_GLOBALS = frozenset(chat_environment(datetime(2000, 1, 1, tzinfo=UTC)).globals)


def is_given(name: str) -> bool:
    """Return True if a name always has a value in chat templates, so that no argument may have this name.

    Such names are messages, tools, special tokens like bos_token, and functions.
    """
    return name in _GIVEN or name in _GLOBALS


def arguments_read(source: str) -> frozenset[str]:
    """Return the names of the arguments that a chat template reads and that a job can set, such as enable_thinking.

    Names that the template sets itself, and names that every template gets (`is_given`), are left out.

    Args:
        source: The text of the template, which must compile.
    """
    return frozenset(name for name in _names_read(source) if not is_given(name))


def reads_tools(source: str) -> bool:
    """Return True if a chat template reads `tools`.

    Args:
        source: The text of the template, which must compile.
    """
    return TOOLS in _names_read(source)


@lru_cache(maxsize=8)  # several stages of a run check the same template
def _names_read(source: str) -> frozenset[str]:
    return frozenset(names_read(chat_environment(datetime(2000, 1, 1, tzinfo=UTC)).parse(source)))


class TemplateArguments(NamedTuple):
    """The arguments that the chat template gets for one row.

    Attributes:
        arguments: The values by name.
        unread: The names of arguments that the row sets, but the template does not read. They have no effect.
    """

    arguments: Arguments
    unread: tuple[str, ...] = ()


class RowArguments:
    """Determines the arguments of the chat template for each row.

    Args:
        common: The arguments that the job sets for all rows.
        columns: Pairs of an argument and the column that sets it.
        reads: The names that the template reads.
        values_are_text: True if values must be parsed from text, as in CSV.
        most: The maximum size of a row's own arguments, and of its own tools, in characters.
        tools: The column of a row's own tools, or None.
        reads_tools: True if the template reads tools.
    """

    def __init__(
        self,
        common: Arguments,
        columns: Sequence[tuple[str, str]],
        reads: frozenset[str],
        values_are_text: bool,
        most: int,
        tools: str | None = None,
        reads_tools: bool = True,
    ) -> None:
        self._common, self._columns, self._reads = common, columns, reads
        self._texts, self._most = values_are_text, most
        self._tools, self._reads_tools = tools, reads_tools

    def of_row(self, values: Values) -> TemplateArguments:
        """Return the template arguments for a row: the job's arguments, overridden by columns of the row.

        Args:
            values: The values of the row by column.

        Raises:
            RowProblem: A value is invalid or too large.
        """
        if not self._columns and self._tools is None:
            return TemplateArguments(self._common)
        given = {name: values.get(column) for name, column in self._columns}
        if self._texts:
            given = {name: _from_text(value) for name, value in given.items()}
        # Tools may be JSON text, since tools of different shapes do not fit in one typed column
        tools = None if self._tools is None else _from_text(values.get(self._tools))
        return TemplateArguments(self._with_tools(self._override(given), tools))

    def of_request(self, body: Mapping[str, Any]) -> TemplateArguments:
        """Return the template arguments for an OpenAI chat request: the job's arguments, overridden by its body.

        Args:
            body: The body of the request.

        Raises:
            RowProblem: A value is invalid or too large.
        """
        given = {name: body[name] for name in (EFFORT, DOCUMENTS) if body.get(name) is not None}
        given |= self._kwargs(body.get(KWARGS))
        unread = tuple(name for name in given if name not in self._reads)
        read = {name: given[name] for name in given if name in self._reads}
        arguments = self._override(read) if read else self._common
        if body.get(CHOICE) == "none":
            return TemplateArguments({name: one for name, one in arguments.items() if name != TOOLS}, unread)
        return TemplateArguments(self._with_tools(arguments, body.get(TOOLS)), unread)

    def _with_tools(self, arguments: Arguments, value: Any) -> Arguments:
        # None keeps the tools of the job; an empty list means no tools
        if value is None:
            return arguments
        try:
            tools = check_tools(value, self._most)
        except TooLarge:
            message = f"the tools are over the limit of {self._most:,} characters"
            raise RowProblem("text_too_long", message, "policy") from None
        except (BadTools, NotPlain) as error:
            gap = "" if str(error).startswith("[") else " "
            raise RowProblem("bad_parameter", f"tools{gap}{error}") from None
        if tools and not self._reads_tools:
            raise _bad(TOOLS, "the chat template reads no tools")
        return {**arguments, TOOLS: tools or None}

    def _kwargs(self, value: Any) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise _bad(KWARGS, f"must be an object, not {kind_of(value)}")
        given = {name: one for name, one in value.items() if one is not None}
        if given.get(_GENERATION_PROMPT) is True:  # the default
            del given[_GENERATION_PROMPT]
        for name in given:
            if is_given(name):
                raise _bad(f"{KWARGS}.{name}", "every chat template has this name already; it cannot be set")
        return given

    def _override(self, given: Mapping[str, Any]) -> Arguments:
        own = {name: value for name, value in given.items() if value is not None}
        try:
            plain: dict[str, Any] = plain_json(own, self._most)
        except TooLarge:
            message = f"the arguments of the chat template are over the limit of {self._most:,} characters"
            raise RowProblem("text_too_long", message, "policy") from None
        except NotPlain as error:
            raise _bad("the arguments of the chat template", f"an argument {error}") from None
        for name, value in plain.items():
            if (problem := argument_problem(name, value)) is not None:
                raise _bad(name, problem)
        return {**self._common, **plain}


def argument_problem(name: str, value: Any) -> str | None:
    """Return why a template argument is invalid, or None. Only `documents` and `reasoning_effort` are checked.

    Args:
        name: The name of the argument.
        value: Its value.
    """
    if name == DOCUMENTS and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        return "must be a list of objects, as in [{title: …, text: …}]"
    if name == EFFORT and not isinstance(value, str):
        return f"must be text such as low, not {kind_of(value)}"
    return None


def _bad(name: str, message: str) -> RowProblem:
    return RowProblem("bad_parameter", f"{name[:100]}: {message}")


def _from_text(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return parse_value(value)
    except (RowProblem, RecursionError):
        return value
