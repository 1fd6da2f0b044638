"""Parsers for the syntaxes in which models write calls as text, with their special tokens.

A parser returns the calls in an answer and the remaining text. Text that cannot be parsed as a call remains. The
time is linear in the length of the text: a failed attempt to parse a call has skipped starts of other calls only
inside a string, and an attempt that begins there ends at the next start.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from batchinfer.core.tool_calls import Call, FoundCalls
from batchinfer.core.tools import is_tool_name
from batchinfer.input.tool_calls.bare_calls import bare_calls
from batchinfer.input.tool_calls.json_calls import MOST_TRIED, ParsedCalls, calls_at, object_at, skip_space
from batchinfer.input.tool_calls.known_tools import KnownTools
from batchinfer.input.tool_calls.tagged_calls import TAGGED_BEGIN, tagged_call

Format = Callable[[str, KnownTools | None], FoundCalls]
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MISTRAL = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\][^\[\]{}]{0,64})?(?:\[ARGS\])?")
_DEEPSEEK = re.compile(rf"\s*([^\s｜]{{1,64}})\s*{CALL_SEP}\s*")
_FENCED = re.compile(r"([^\s｜]{1,64})\s*```(?:json)?\s*")
_FENCE_END = re.compile(rf"\s*(?:```)?\s*(?:{CALL_END}|(?={CALL_BEGIN}|{CALLS_END})|$)")
_NOTHING = re.compile(r"(?!)")
_BeginsAt = Callable[[re.Match[str]], ParsedCalls | None]  # parses the calls after a matched start


class TaggedCalls(NamedTuple):
    """A syntax of tool calls: JSON with a call or a list of calls between two tags.

    Args:
        begins: The start tags. Models use different ones.
        end: The end tag.
        closed: True if calls are invalid unless the end tag, another call or the end of the answer follows the JSON.
    """

    begins: tuple[str, ...]
    end: str
    closed: bool

    def found(self, text: str, _: KnownTools | None) -> FoundCalls:
        """Extract the tool calls from an answer, and return them with the remaining text."""
        return _take_out(text, "|".join(map(re.escape, self.begins)), self._read)

    def _read(self, begin: re.Match[str]) -> ParsedCalls | None:
        text = begin.string
        found = calls_at(text, begin.end())
        if found is None:
            return None
        behind = skip_space(text, found.end)
        if text.startswith(self.end, behind):
            return ParsedCalls(found.calls, behind + len(self.end))
        ended = behind == len(text) or text.startswith(self.begins, behind)
        return found if ended or not self.closed else None


_GRANITE = TaggedCalls(("<|tool_call|>", "<tool_call>"), "</tool_call>", closed=False)


def _granite(text: str, tools: KnownTools | None) -> FoundCalls:
    marked = any(begin in text for begin in _GRANITE.begins)
    return _GRANITE.found(text, tools) if marked else bare_calls(text, tools)


def _mistral(text: str, _: KnownTools | None) -> FoundCalls:
    return _take_out(text, re.escape(TOOL_CALLS), _mistral_calls)


def _mistral_calls(begin: re.Match[str]) -> ParsedCalls | None:
    # Older models write a list of calls, newer models a name and arguments
    text, at = begin.string, begin.end()
    named = _MISTRAL.match(text, at)
    if named is None:
        return calls_at(text, at)
    start = skip_space(text, named.end())
    span = object_at(text, start)
    return None if span is None else ParsedCalls([Call(named[1], text[slice(*span)])], span[1])


def _deepseek(text: str, _: KnownTools | None) -> FoundCalls:
    none = rf"{CALLS_BEGIN}\s*{CALLS_END}"
    return _take_out(text, f"{CALL_BEGIN}|{none}", _deepseek_call, re.compile(f"{CALLS_BEGIN}|{CALLS_END}"))


def _deepseek_call(begin: re.Match[str]) -> ParsedCalls | None:
    # V3 and R1 write the kind of tool and a code fence around arguments; V3.1 writes neither
    text = begin.string
    if begin[0] != CALL_BEGIN:
        return ParsedCalls([], begin.end())
    first = _DEEPSEEK.match(text, begin.end())
    if first is None:
        return None
    fenced = _FENCED.match(text, first.end())
    name, start = (first[1], first.end()) if fenced is None else (fenced[1], fenced.end())
    span = object_at(text, start)
    end = None if span is None else _FENCE_END.match(text, span[1])
    if span is None or end is None or not is_tool_name(name):
        return None
    return ParsedCalls([Call(name, text[slice(*span)])], end.end())


def _qwen_coder(text: str, tools: KnownTools | None) -> FoundCalls:
    return _take_out(text, TAGGED_BEGIN, lambda begin: tagged_call(begin, tools))


def _take_out(text: str, begins: str, read: _BeginsAt, around: re.Pattern[str] = _NOTHING) -> FoundCalls:
    calls: list[Call] = []
    pieces, start = [], 0
    for begin, found in _read_each(text, re.compile(begins), read):
        pieces.append(text[start:begin])
        calls += found.calls
        start = found.end
    if not pieces:
        return FoundCalls(text, [])
    remaining = [piece for piece in (around.sub("", one).strip() for one in [*pieces, text[start:]]) if piece]
    return FoundCalls("\n".join(remaining) or None, calls)


def _read_each(text: str, begins: re.Pattern[str], read: _BeginsAt) -> Iterator[tuple[int, ParsedCalls]]:
    at = 0
    for _ in range(MOST_TRIED):
        begin = begins.search(text, at)
        if begin is None:
            return
        found = read(begin)
        at = begin.end() if found is None else found.end
        if found is not None:
            yield begin.start(), found


FORMATS: dict[str, Format] = {
    "hermes": TaggedCalls(("<tool_call>",), "</tool_call>", closed=True).found,
    "granite": _granite,
    "nemotron": TaggedCalls(("<TOOLCALL>",), "</TOOLCALL>", closed=True).found,
    "mistral": _mistral,
    "llama3": bare_calls,
    "deepseek": _deepseek,
    "qwen3-coder": _qwen_coder,
}
HARMONY = "harmony"  # parsed from tokens instead of text, see harmony.py
