"""Parses calls written as plain JSON without a marker. Only their content shows that they are calls.

An object or a list of objects is a call if each object has arguments and the name of one of the row's tools. It may
be in a code fence, with text around it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from batchinfer.core.tool_calls import Call, FoundCalls
from batchinfer.input.tool_calls.json_calls import MOST_TRIED, ParsedCalls, calls_at, value_end
from batchinfer.input.tool_calls.known_tools import KnownTools

PYTHON_TAG = "<|python_tag|>"
_BEGIN = re.compile(
    rf"(?P<tag>{re.escape(PYTHON_TAG)}\s*+)?(?P<fence>```\w*+\s*+)?(?P<json>(?:\[\s*+)?\{{\s*+\")"
)
# Limit on parsed characters per character of the answer; unfinished JSON is parsed at each object
_MOST_READ = 16
_FENCE_END = re.compile(r"\s*(?:```|\Z)")
_NEXT = re.compile(r"\s*[;,]?\s*(?=[\[{])")
_TAIL = re.compile(r"\s*[;,]?\s*\Z")


class _CallGroup(NamedTuple):
    calls: list[Call]
    start: int
    end: int
    tagged: bool


def bare_calls(text: str, tools: KnownTools | None) -> FoundCalls:
    """Extract the tool calls that an answer writes as JSON without markers around it.

    Args:
        text: The answer.
        tools: The row's tools. None if they are unknown; an answer with text other than calls then has no calls.

    Returns:
        The calls, and the remaining text.
    """
    groups = _groups(text, tools)
    if not groups:
        return FoundCalls(text, [])
    starts, ends = [0, *(one.end for one in groups)], [*(one.start for one in groups), len(text)]
    before, *rest = (text[start:end].strip() for start, end in zip(starts, ends, strict=True))
    if tools is None and (any(rest) or (before and not groups[0].tagged)):
        return FoundCalls(text, [])
    remaining = "\n".join(filter(None, [before, *rest]))
    return FoundCalls(remaining or None, [call for one in groups for call in one.calls])


def _groups(text: str, tools: KnownTools | None) -> list[_CallGroup]:
    groups: list[_CallGroup] = []
    at, left = 0, _MOST_READ * len(text)
    for _ in range(MOST_TRIED if '"name"' in text else 0):
        begin = _BEGIN.search(text, at)
        if begin is None or left < 0:
            break
        place = begin.start("json")
        end, whole = value_end(text, place)
        found = _following(text, place, tools) if whole else None
        if found is None:
            left -= end - place
            at = end if whole else begin.end()  # calls within other JSON do not count
            continue
        groups.append(_with_surroundings(text, begin, found))
        at = groups[-1].end
    return groups


def _following(text: str, at: int, tools: KnownTools | None) -> ParsedCalls | None:
    calls: list[Call] = []
    end = at
    while (found := calls_at(text, at, needs=True)) is not None and _are_known(found.calls, tools):
        calls += found.calls
        end = found.end
        following = _NEXT.match(text, end)
        if following is None:
            break
        at = following.end()
    return ParsedCalls(calls, end) if calls else None


def _are_known(calls: list[Call], tools: KnownTools | None) -> bool:
    return bool(calls) and (tools is None or all(call.name in tools for call in calls))


def _with_surroundings(text: str, begin: re.Match[str], found: ParsedCalls) -> _CallGroup:
    start, end = begin.start(), found.end
    if begin["fence"] is not None:
        closing = _FENCE_END.match(text, end)
        start, end = (begin.start("json"), end) if closing is None else (start, closing.end())
    tail = _TAIL.match(text, end)
    return _CallGroup(found.calls, start, end if tail is None else tail.end(), begin["tag"] is not None)
