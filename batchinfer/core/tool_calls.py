"""Calls of tools that a model makes in its answer, and the style in which a checkpoint writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Self, get_args

# The formats of calls that are read, by the names that jobs have for them
CallStyleName = Literal[
    "hermes", "granite", "nemotron", "mistral", "llama3", "deepseek", "qwen3-coder", "harmony"
]
CALL_STYLES: tuple[str, ...] = get_args(CallStyleName)
# Raise it when the same answers give other calls: results with calls are then published again, from stored answers
_VERSION = 2


class Call(NamedTuple):
    """A call of one tool. `arguments`: the JSON text of an object."""

    name: str
    arguments: str


class FoundCalls(NamedTuple):
    """The calls of an answer, and what else it says; None: nothing."""

    text: str | None
    calls: list[Call]


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a checkpoint writes calls.

    `name`: of the format. `shown`: ids and texts of special tokens that are a part of calls, though texts of answers
    leave them out. `of_all`: the job names the style, so that rows may call tools that nothing lists.
    """

    name: str
    shown: tuple[tuple[int, str], ...] = ()
    of_all: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the form that `from_json` reads. It is part of the identity of an index and of a result."""
        return {**asdict(self), "version": _VERSION}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        shown = tuple((int(token), str(text)) for token, text in value["shown"])
        return cls(value["name"], shown, value["of_all"])
