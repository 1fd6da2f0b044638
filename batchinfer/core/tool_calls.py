"""Tool calls in answers, and the format in which a checkpoint writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Self, get_args

# The supported formats, by their names in job files
CallStyleName = Literal[
    "hermes", "granite", "nemotron", "mistral", "llama3", "deepseek", "qwen3-coder", "harmony"
]
CALL_STYLES: tuple[str, ...] = get_args(CallStyleName)
# Raise it when the same answers give other calls: results with calls are then published again from the store
_VERSION = 2


class Call(NamedTuple):
    """A call of one tool in an answer.

    Args:
        name: The name of the tool.
        arguments: The JSON text of an object with the arguments.
    """

    name: str
    arguments: str


class FoundCalls(NamedTuple):
    """The tool calls in an answer, and its remaining text.

    Args:
        text: The text without calls. None: the answer contains only calls.
        calls: The calls in order.
    """

    text: str | None
    calls: list[Call]


@dataclass(frozen=True, slots=True)
class CallStyle:
    """The format in which a checkpoint writes tool calls.

    Args:
        name: The name of the format.
        shown: (id, text) of each special token that occurs in calls. Texts of answers usually omit special tokens.
        of_all: True if the job sets the format. Then calls are also parsed in rows without a list of tools.
    """

    name: str
    shown: tuple[tuple[int, str], ...] = ()
    of_all: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the format as JSON values, which `from_json` reads.

        They are part of the identity of a result: a run with another format does not reuse the result.
        """
        return {**asdict(self), "version": _VERSION}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the format from the JSON values that `to_json` returns."""
        shown = tuple((int(token), str(text)) for token, text in value["shown"])
        return cls(value["name"], shown, value["of_all"])
