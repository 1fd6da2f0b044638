"""The tools that chat templates are told of: what an index keeps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchinfer.input.openai import TOOLS
from batchinfer.input.tool_calls.known_tools import known_tools


class ToldTools:
    """Says which tools rows have. Most rows have the job's, whose text is made once."""

    def __init__(self) -> None:
        self._last: tuple[Sequence[Mapping[str, Any]], str] | None = None

    def of(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the tools among the arguments of a chat template as `known_tools` writes them; None: there are
        none."""
        tools = arguments.get(TOOLS)
        if not tools:
            return None
        if self._last is None or self._last[0] is not tools:
            self._last = tools, known_tools(tools)
        return self._last[1]
