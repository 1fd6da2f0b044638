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
from batchinfer.data.tool_calls.json_calls import Read, behind_space, call_at, calls_at, object_at
from batchinfer.data.tool_calls.known_tools import KnownTools
from batchinfer.data.tool_calls.tagged_calls import tagged_call

Format = Callable[[str, KnownTools | None], FoundCalls]
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_MISTRAL = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\][^\[\]{}]{0,64})?(?:\[ARGS\])?")
_DEEPSEEK = re.compile(rf"\s*([^\s｜]{{1,64}})\s*{CALL_SEP}\s*")
_FENCED = re.compile(r"([^\s｜]{1,64})\s*```(?:json)?\s*")
_FENCE_END = re.compile(rf"\s*(?:```)?\s*(?:{CALL_END}|$)")
# Beginnings of calls that are tried in an answer. A failed one costs as much as finding its line in the text, so that a
# text of nothing but beginnings would cost their number times its length
MOST_TRIED = 1024
_NOTHING = re.compile(r"(?!)")
_BETWEEN = re.compile(r"\s*[;,]?\s*")


class Tagged(NamedTuple):
    """A format of JSON between two texts: a call, or a list of calls. `closed`: the second text, or the answer's end,
    must follow."""

    begins: tuple[str, ...]
    end: str
    closed: bool

    def read(self, text: str, at: int) -> Read | None:
        """Return the calls of the JSON at `at`, and where what belongs to them ends."""
        found = calls_at(text, at)
        if found is None:
            return None
        behind = behind_space(text, found.end)
        if text.startswith(self.end, behind):
            return Read(found.calls, behind + len(self.end))
        return None if self.closed and behind < len(text) else found

    def found(self, text: str, _: KnownTools | None) -> FoundCalls:
        """Take the calls out of a text."""
        return _taken_out(text, self.begins, self.read)


def _mistral(text: str, tools: KnownTools | None) -> FoundCalls:
    return _taken_out(text, (TOOL_CALLS,), _mistral_calls)


def _mistral_calls(text: str, at: int) -> Read | None:
    """Return the calls behind the marker: a list as older models write it, or a name and arguments."""
    named = _MISTRAL.match(text, at)
    if named is None:
        return calls_at(text, at)
    start = behind_space(text, named.end())
    span = object_at(text, start)
    return None if span is None else Read([Call(named[1], text[slice(*span)])], span[1])


def _deepseek(text: str, tools: KnownTools | None) -> FoundCalls:
    return _taken_out(text, (CALL_BEGIN,), _deepseek_call, around=re.compile(f"{CALLS_BEGIN}|{CALLS_END}"))


def _deepseek_call(text: str, at: int) -> Read | None:
    """Return one call: of V3 and R1 with the tool's kind, its name, and arguments in a fence; of V3.1 without these."""
    first = _DEEPSEEK.match(text, at)
    if first is None:
        return None
    fenced = _FENCED.match(text, first.end())
    name, start = (first[1], first.end()) if fenced is None else (fenced[1], fenced.end())
    span = object_at(text, start)
    end = None if span is None else _FENCE_END.match(text, span[1])
    if span is None or end is None or not is_tool_name(name):
        return None
    return Read([Call(name, text[slice(*span)])], end.end())


def _llama(text: str, tools: KnownTools | None) -> FoundCalls:
    """Read calls that nothing but their form tells from an answer: they are all that it says, or that it says behind a
    token, and they are of tools that the row has."""
    before, tag, behind = text.partition(PYTHON_TAG)
    body = behind if tag else text
    calls: list[Call] = []
    at = behind_space(body, 0)
    while at < len(body):
        found = call_at(body, at, ("parameters", "arguments"), needs=True)
        if found is None or (tools is not None and found.calls[0].name not in tools):
            return FoundCalls(text, [])
        calls += found.calls
        between = _BETWEEN.match(body, found.end)
        at = found.end if between is None else between.end()
    said = before.strip() if tag else ""
    return FoundCalls(said or None, calls) if calls else FoundCalls(text, [])


def _qwen_coder(text: str, tools: KnownTools | None) -> FoundCalls:
    return _taken_out(text, ("<tool_call>",), lambda text, at: tagged_call(text, at, tools))


def _taken_out(
    text: str,
    begins: tuple[str, ...],
    read: Callable[[str, int], Read | None],
    around: re.Pattern[str] = _NOTHING,
) -> FoundCalls:
    """Take the calls out of a text that begin with one of these texts, and the white space around them. `around`: what
    stands around all calls."""
    calls: list[Call] = []
    pieces, start = [], 0
    for begin, found in _read_each(text, re.compile("|".join(map(re.escape, begins))), read):
        pieces.append(text[start:begin])
        calls += found.calls
        start = found.end
    if not calls:
        return FoundCalls(text, [])
    said = [piece for piece in (around.sub("", one).strip() for one in [*pieces, text[start:]]) if piece]
    return FoundCalls("\n".join(said) or None, calls)


def _read_each(
    text: str, begins: re.Pattern[str], read: Callable[[str, int], Read | None]
) -> Iterator[tuple[int, Read]]:
    """Yield where calls begin, and what was read there."""
    at = 0
    for _ in range(MOST_TRIED):
        begin = begins.search(text, at)
        if begin is None:
            return
        found = read(text, begin.end())
        at = begin.end() if found is None else found.end
        if found is not None:
            yield begin.start(), found


FORMATS: dict[str, Format] = {
    "hermes": Tagged(("<tool_call>",), "</tool_call>", closed=True).found,
    "granite": Tagged(("<|tool_call|>", "<tool_call>"), "</tool_call>", closed=False).found,
    "nemotron": Tagged(("<TOOLCALL>",), "</TOOLCALL>", closed=True).found,
    "mistral": _mistral,
    "llama3": _llama,
    "deepseek": _deepseek,
    "qwen3-coder": _qwen_coder,
}
HARMONY = "harmony"  # the one style that is read from tokens
