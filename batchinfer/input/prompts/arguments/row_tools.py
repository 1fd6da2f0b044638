"""The tools of rows, as the index stores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchinfer.input.openai import TOOLS
from batchinfer.input.tool_calls.known_tools import known_tools


class RowTools:
    """Converts the tools of rows to text.

    The latest result is cached, since consecutive rows usually have the same tools.
    """

    def __init__(self) -> None:
        self._last: tuple[Sequence[Mapping[str, Any]], str] | None = None

    def of(self, arguments: Mapping[str, Any]) -> str | None:
        """Return the tools among a row's template arguments as JSON text in the format of `known_tools`.

        None without tools.

        Args:
            arguments: The template arguments of the row, in which `tools` may be a list of tools.
        """
        tools = arguments.get(TOOLS)
        if not tools:
            return None
        if self._last is None or self._last[0] is not tools:
            self._last = tools, known_tools(tools)
        return self._last[1]
