"""Tells a chat template the arguments that the job and its rows have for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from batchinfer.core.plain_json import NotPlain, TooLarge, plain_json
from batchinfer.core.tools import BadTools, checked_tools
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
    """Whether every template has this name already: messages, special tokens, functions."""
    return name in _GIVEN or name in _GLOBALS


def arguments_read(source: str) -> frozenset[str]:
    """The arguments that a chat template reads: names that neither the template sets nor every template has.

    The template must be one that can be compiled.
    """
    return frozenset(name for name in _names_read(source) if not is_given(name))


def reads_tools(source: str) -> bool:
    """Whether a chat template reads `tools`. It must be one that can be compiled."""
    return TOOLS in _names_read(source)


@lru_cache(maxsize=8)  # several stages of a run check the same template
def _names_read(source: str) -> frozenset[str]:
    return frozenset(names_read(chat_environment(datetime(2000, 1, 1, tzinfo=UTC)).parse(source)))


class Told(NamedTuple):
    """The arguments of one row, and the names of those that the template does not read."""

    arguments: Arguments
    unread: tuple[str, ...] = ()


class RowArguments:
    """Chooses what the template is told of each row.

    `common` are the arguments that the job gives to all rows, `columns` pairs of an argument and the column that sets
    it, `reads` the names that the template reads. `values_are_text`: as CSV has them. `most` bounds the characters of
    a row's own arguments, and those of its own tools, which stand in the column `tools`.
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

    def of_row(self, values: Values) -> Told:
        """The job's arguments with those of the row's columns laid over. Raises RowProblem."""
        if not self._columns and self._tools is None:
            return Told(self._common)
        given = {name: values.get(column) for name, column in self._columns}
        if self._texts:
            given = {name: _from_text(value) for name, value in given.items()}
        # as JSON text tools of different shapes fit into one column
        tools = None if self._tools is None else _from_text(values.get(self._tools))
        return Told(self._with_tools(self._laid_over(given), tools))

    def of_request(self, body: Mapping[str, Any]) -> Told:
        """The job's arguments with those of a chat request laid over. Raises RowProblem."""
        given = {name: body[name] for name in (EFFORT, DOCUMENTS) if body.get(name) is not None}
        given |= self._kwargs(body.get(KWARGS))
        unread = tuple(name for name in given if name not in self._reads)
        read = {name: given[name] for name in given if name in self._reads}
        arguments = self._laid_over(read) if read else self._common
        if body.get(CHOICE) == "none":
            return Told({name: one for name, one in arguments.items() if name != TOOLS}, unread)
        return Told(self._with_tools(arguments, body.get(TOOLS)), unread)

    def _with_tools(self, arguments: Arguments, value: Any) -> Arguments:
        """Return the arguments with a row's own tools; an empty list of them is none."""
        if value is None:
            return arguments
        try:
            tools = checked_tools(value, self._most)
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
        if given.get(_GENERATION_PROMPT) is True:  # as every prompt has it
            del given[_GENERATION_PROMPT]
        for name in given:
            if is_given(name):
                raise _bad(f"{KWARGS}.{name}", "every chat template has this name already; it cannot be set")
        return given

    def _laid_over(self, given: Mapping[str, Any]) -> Arguments:
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
    """Say what is wrong with the value of an argument whose kind is known."""
    if name == DOCUMENTS and not (isinstance(value, list) and all(isinstance(one, dict) for one in value)):
        return "must be a list of objects, as in [{title: …, text: …}]"
    if name == EFFORT and not isinstance(value, str):
        return f"must be text such as low, not {kind_of(value)}"
    return None


def _bad(name: str, message: str) -> RowProblem:
    return RowProblem("bad_parameter", f"{name[:100]}: {message}")


def _from_text(value: Any) -> Any:
    """The value that a file without types holds: a number, true, a list or an object as in JSON; else the text."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return parse_value(value)
    except (RowProblem, RecursionError):
        return value
