"""The formats in which models write calls as text, with the special tokens that belong to them.

A format takes the text of an answer and gives the calls in it with what is left. What does not read as a call stays in
the text. The work grows with the length of the text: a reading that fails has passed further beginnings of calls only
within a string, and one that starts there ends at the next beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from batchinfer.core.tool_calls import Call, FoundCalls
from batchinfer.core.tools import is_tool_name
from batchinfer.input.tool_calls.bare_calls import bare_calls
from batchinfer.input.tool_calls.json_calls import MOST_TRIED, Read, behind_space, calls_at, object_at
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
_BeginsAt = Callable[[re.Match[str]], Read | None]  # what a beginning begins


class Tagged(NamedTuple):
    """A format of JSON between two texts: a call, or a list of calls. `closed`: the second text, another call or the
    answer's end must follow."""

    begins: tuple[str, ...]
    end: str
    closed: bool

    def found(self, text: str, _: KnownTools | None) -> FoundCalls:
        """Take the calls out of a text."""
        return _taken_out(text, "|".join(map(re.escape, self.begins)), self._read)

    def _read(self, begin: re.Match[str]) -> Read | None:
        text = begin.string
        found = calls_at(text, begin.end())
        if found is None:
            return None
        behind = behind_space(text, found.end)
        if text.startswith(self.end, behind):
            return Read(found.calls, behind + len(self.end))
        ended = behind == len(text) or text.startswith(self.begins, behind)
        return found if ended or not self.closed else None


_GRANITE = Tagged(("<|tool_call|>", "<tool_call>"), "</tool_call>", closed=False)


def _granite(text: str, tools: KnownTools | None) -> FoundCalls:
    marked = any(begin in text for begin in _GRANITE.begins)
    return _GRANITE.found(text, tools) if marked else bare_calls(text, tools)


def _mistral(text: str, _: KnownTools | None) -> FoundCalls:
    return _taken_out(text, re.escape(TOOL_CALLS), _mistral_calls)


def _mistral_calls(begin: re.Match[str]) -> Read | None:
    """Return the calls behind the marker: a list as older models write it, or a name and arguments."""
    text, at = begin.string, begin.end()
    named = _MISTRAL.match(text, at)
    if named is None:
        return calls_at(text, at)
    start = behind_space(text, named.end())
    span = object_at(text, start)
    return None if span is None else Read([Call(named[1], text[slice(*span)])], span[1])


def _deepseek(text: str, _: KnownTools | None) -> FoundCalls:
    none = rf"{CALLS_BEGIN}\s*{CALLS_END}"
    return _taken_out(text, f"{CALL_BEGIN}|{none}", _deepseek_call, re.compile(f"{CALLS_BEGIN}|{CALLS_END}"))


def _deepseek_call(begin: re.Match[str]) -> Read | None:
    """Return one call: of V3 and R1 with the tool's kind, its name, and arguments in a fence; of V3.1 without these."""
    text = begin.string
    if begin[0] != CALL_BEGIN:
        return Read([], begin.end())
    first = _DEEPSEEK.match(text, begin.end())
    if first is None:
        return None
    fenced = _FENCED.match(text, first.end())
    name, start = (first[1], first.end()) if fenced is None else (fenced[1], fenced.end())
    span = object_at(text, start)
    end = None if span is None else _FENCE_END.match(text, span[1])
    if span is None or end is None or not is_tool_name(name):
        return None
    return Read([Call(name, text[slice(*span)])], end.end())


def _qwen_coder(text: str, tools: KnownTools | None) -> FoundCalls:
    return _taken_out(text, TAGGED_BEGIN, lambda begin: tagged_call(begin, tools))


def _taken_out(text: str, begins: str, read: _BeginsAt, around: re.Pattern[str] = _NOTHING) -> FoundCalls:
    """Take the calls out of a text, and the white space around them.

    Args:
        text: The answer.
        begins: A pattern of what calls begin with.
        read: Reads the calls there. If there are none, but a marker that announces none, the marker is taken out.
        around: What stands around all calls.
    """
    calls: list[Call] = []
    pieces, start = [], 0
    for begin, found in _read_each(text, re.compile(begins), read):
        pieces.append(text[start:begin])
        calls += found.calls
        start = found.end
    if not pieces:
        return FoundCalls(text, [])
    said = [piece for piece in (around.sub("", one).strip() for one in [*pieces, text[start:]]) if piece]
    return FoundCalls("\n".join(said) or None, calls)


def _read_each(text: str, begins: re.Pattern[str], read: _BeginsAt) -> Iterator[tuple[int, Read]]:
    """Yield where calls begin, and what was read there."""
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
    "hermes": Tagged(("<tool_call>",), "</tool_call>", closed=True).found,
    "granite": _granite,
    "nemotron": Tagged(("<TOOLCALL>",), "</TOOLCALL>", closed=True).found,
    "mistral": _mistral,
    "llama3": bare_calls,
    "deepseek": _deepseek,
    "qwen3-coder": _qwen_coder,
}
HARMONY = "harmony"  # the one style that is read from tokens
