"""Parses YAML 1.2 into a tree in which every value knows its line.

Values follow the core schema (`no`, `1_000` and `2026-01-01` are texts), and no objects are constructed. Tags,
directives, further documents and duplicate keys are refused. Aliases are followed up to a limit.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)
from ruamel.yaml.reader import ReaderError

from batchinfer.core.exact_json import read_float

# ruamel's round-trip loader (`.lc`) is not used: it reads `1_000` as a number and 2026-01-01 as a date, stops at the
# first duplicate key, raises RecursionError for deep nesting, follows aliases without a limit, and takes 10.8 s of CPU
# time for 1 MiB of `- a`, which MAX_NODES stops here after 2.7 s.
Scalar = str | int | float | bool | None
Loc = tuple[str | int, ...]

MAX_DEPTH = 32  # a job needs 4; a limit protects the stack
MAX_NODES = 100_000  # 1 MiB of `- a` takes 5 s to parse: stop at 2 s
MAX_WEIGHT = 8 << 20  # characters after following aliases; each node counts as NODE_WEIGHT
NODE_WEIGHT = 64
MAX_DIGITS = 400  # more than any float has; int() refuses 4,300

UNUSABLE = re.compile(r"[\x00\ud800-\udfff]")  # not allowed in paths or UTF-8
_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NUMBERS: tuple[tuple[re.Pattern[str], Callable[[str], int | float]], ...] = (
    (re.compile(r"[-+]?[0-9]+"), int),
    (re.compile(r"0o[0-7]+"), lambda text: int(text[2:], 8)),
    (re.compile(r"0x[0-9a-fA-F]+"), lambda text: int(text[2:], 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), read_float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)"), lambda text: float(text.replace(".", ""))),
    (re.compile(r"\.(nan|NaN|NAN)"), lambda _: float("nan")),
)
_QUOTE_BRACES = "put a text that holds { } or ${…} in quotes, or write it below the key after |"
# A part of the parser's message, and how to fix the file
_CURES = (
    ("'\\t'", "indent with spaces, not tabs"),
    ("mapping values are not allowed", 'put a text that holds ": " in quotes'),
    ("unexpected end of stream", "close the quotes"),
    ("unknown escape", "inside double quotes write \\\\ for a backslash, or use single quotes"),
    ("'%'", "put a text that begins with % in quotes"),
    ("'@'", "put a text that begins with @ in quotes"),
    ("'`'", "put a text that begins with ` in quotes"),
    ("<block end>", "check that the keys of a section begin in the same column"),
    ("could not find expected ':'", 'a key is followed by ": "'),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake in a job file. `JobFile.mistake` adds the line or `--set` option that caused it.

    Attributes:
        loc: The location of the value: a tuple of keys and positions, such as ("output", "columns", 1).
        message: The problem.
        hint: Advice for the user, or None.
        line: The line of the mistake, if it is not the line of the key. Else None.
    """

    loc: Loc
    message: str
    hint: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A value in a YAML text. A list or mapping contains further nodes.

    Attributes:
        value: A scalar, the items of a list, or the entries of a mapping by key.
        line: The line of the value, from 1.
        weight: The number of characters of the value, including the values inside it. An alias (`*name`) counts as the
            value that it refers to.
        depth: The number of nested levels of lists and mappings. 0 for a scalar.
        text_line: For a `|` block, the line where its text begins. Else None.
    """

    value: Scalar | tuple[Node, ...] | dict[str, Entry]
    line: int
    weight: int
    depth: int = 0
    text_line: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A key of a YAML mapping: its line, and its value."""

    line: int
    node: Node


class _Stopped(Exception):
    # The rest of a YAML text cannot be read
    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


def shorten(text: str, limit: int = 60) -> str:
    """Return a text in quotes for a message: on one line, and shortened to about `limit` characters."""
    return json.dumps(text if len(text) <= limit else text[: limit - 1] + "…", ensure_ascii=False)


def read_yaml(text: str) -> tuple[Node | None, list[Finding]]:
    """Parse a YAML text with one document, and return its tree and all mistakes.

    Returns:
        (tree, mistakes). The tree is None if the text is empty or unreadable.
    """
    reader = _Reader(text)
    try:
        return reader.document(), reader.findings
    except _Stopped as stopped:
        return None, [*reader.findings, stopped.finding]


def resolve(text: str) -> Scalar:
    """Return the value of an unquoted YAML scalar, by the core schema of YAML 1.2: null, bool, int, float or str."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if len(text) > MAX_DIGITS:
        return text
    for pattern, number in _NUMBERS:
        if pattern.fullmatch(text):
            return number(text)
    return text


@dataclass(frozen=True, slots=True)
class _Lines:
    # Lines as editors count them. YAML's parser also counts U+0085 and U+2028 as line ends.
    starts: list[int]

    @classmethod
    def of(cls, text: str) -> _Lines:
        return cls([0, *(match.end() for match in re.finditer(r"\r\n?|\n", text))])

    def at(self, index: int) -> int:
        """Return the line, from 1, of the character at position `index`."""
        return bisect.bisect_right(self.starts, index)


def _events(text: str, lines: _Lines) -> Iterator[Any]:
    directive = re.search(r"^%", text, re.MULTILINE)
    if directive:
        message = "a line that begins with % (a YAML directive) is not allowed in a job file"
        raise _Stopped(Finding((), message, "remove the line", lines.at(directive.start())))
    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except ReaderError as error:
        message = f"the character U+{ord(text[error.position]):04X} is not allowed in a text file"
        raise _Stopped(Finding((), message, "remove it", lines.at(error.position))) from None
    except MarkedYAMLError as error:
        raise _Stopped(_syntax(error, text, lines)) from None
    except YAMLError as error:
        raise _Stopped(Finding((), f"this is not valid YAML: {error}")) from None


def _syntax(error: MarkedYAMLError, text: str, lines: _Lines) -> Finding:
    mark = error.problem_mark or error.context_mark
    line = lines.at(mark.index)
    started = lines.at(error.context_mark.index) if error.context_mark else line
    context = f"{error.context}, " if error.context else ""
    began = f" (it began in line {started})" if started != line else ""
    problem = f"{context}{error.problem}"
    source = text[lines.starts[line - 1] :].split("\n", 1)[0]
    return Finding((), f"this is not valid YAML: {problem}{began}", _cure(problem, source), line)


def _cure(problem: str, source: str) -> str | None:
    if "{{" in source or "${" in source:
        return _QUOTE_BRACES
    return next((cure for fragment, cure in _CURES if fragment in problem), None)


@dataclass(slots=True)
class _Reader:
    text: str
    findings: list[Finding] = field(default_factory=list)
    _anchors: dict[str, Node] = field(default_factory=dict)
    _nodes: int = 0
    _lines: _Lines = field(init=False)
    _source: Iterator[Any] = field(init=False)

    def __post_init__(self) -> None:
        self._lines = _Lines.of(self.text)
        self._source = _events(self.text, self._lines)

    def document(self) -> Node | None:
        next(self._source)  # start of the stream
        if isinstance(next(self._source), StreamEndEvent):
            return None
        root = self._node(next(self._source), ())
        next(self._source)  # end of the document
        following = next(self._source)
        if isinstance(following, DocumentStartEvent):
            line = self._line(following)
            raise _Stopped(
                Finding(
                    (), "a second YAML document begins here; a job file is a single one", "remove ---", line
                )
            )
        return root

    def _node(self, event: Any, loc: Loc) -> Node:
        self._bound(event, loc)
        if isinstance(event, AliasEvent):
            return self._alias(event, loc)
        if event.tag is not None:
            self._found(
                loc, f"the tag {shorten(str(event.tag))} is not allowed in a job file", "remove it", event
            )
        node = self._untagged(event, loc)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _untagged(self, event: Any, loc: Loc) -> Node:
        if isinstance(event, MappingStartEvent):
            return self._mapping(event, loc)
        if isinstance(event, SequenceStartEvent):
            return self._sequence(event, loc)
        return self._scalar(event, loc)

    def _scalar(self, event: Any, loc: Loc) -> Node:
        text = self._text(event, loc)
        line = self._line(event)
        value = text if event.style or event.tag is not None else resolve(text)
        text_line = line + 1 if event.style == "|" else None
        return Node(value, line, NODE_WEIGHT + len(text), text_line=text_line)

    def _sequence(self, start: Any, loc: Loc) -> Node:
        items: list[Node] = []
        while not isinstance(event := next(self._source), SequenceEndEvent):
            items.append(self._node(event, (*loc, len(items))))
        return self._container(tuple(items), items, start, loc)

    def _mapping(self, start: Any, loc: Loc) -> Node:
        entries: dict[str, Entry] = {}
        while not isinstance(event := next(self._source), MappingEndEvent):
            key = self._key(event, loc)
            node = self._node(next(self._source), (*loc, key))
            if key in entries:
                message = f"the key is given twice; the first is in line {entries[key].line}"
                self._found((*loc, key), message, "keep one of the two", event)
            else:
                entries[key] = Entry(self._line(event), node)
        return self._container(entries, [entry.node for entry in entries.values()], start, loc)

    def _key(self, event: Any, loc: Loc) -> str:
        if not isinstance(event, ScalarEvent):
            raise _Stopped(
                Finding(
                    loc,
                    "a key must be plain text; found braces, brackets or an alias",
                    _QUOTE_BRACES,
                    self._line(event),
                )
            )
        self._bound(event, loc)
        if event.tag is not None:
            self._found(
                loc, f"the tag {shorten(str(event.tag))} is not allowed in a job file", "remove it", event
            )
        return self._text(event, loc)

    def _text(self, event: Any, loc: Loc) -> str:
        # JSON writes a character beyond U+FFFF as a surrogate pair ("\ud83d\ude00")
        text: str = event.value
        if not UNUSABLE.search(text):
            return text
        paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        if UNUSABLE.search(paired):
            self._found(loc, "the text holds a NUL or half a surrogate pair", "remove the escape", event)
        return UNUSABLE.sub("\ufffd", paired)

    def _container(self, value: Any, children: list[Node], start: Any, loc: Loc) -> Node:
        weight = NODE_WEIGHT + sum(child.weight for child in children)
        depth = 1 + max((child.depth for child in children), default=0)
        if weight > MAX_WEIGHT or depth > MAX_DEPTH:
            message = "this grows too large once its aliases (*name) are followed"
            raise _Stopped(Finding(loc, message, "write out what is meant", self._line(start)))
        return Node(value, self._line(start), weight, depth)

    def _alias(self, event: Any, loc: Loc) -> Node:
        node = self._anchors.get(event.anchor)
        if node is None:
            message = f"the alias *{event.anchor} names no anchor that was complete before it"
            raise _Stopped(
                Finding(loc, message, f"put &{event.anchor} at the value it means", self._line(event))
            )
        return node

    def _bound(self, event: Any, loc: Loc) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise _Stopped(
                Finding(loc, f"a job file has at most {MAX_NODES:,} values", None, self._line(event))
            )
        if len(loc) > MAX_DEPTH:
            raise _Stopped(Finding((), f"a job file nests at most {MAX_DEPTH} deep", None, self._line(event)))

    def _found(self, loc: Loc, message: str, hint: str, event: Any) -> None:
        self.findings.append(Finding(loc, message, hint, self._line(event)))

    def _line(self, event: Any) -> int:
        return self._lines.at(event.start_mark.index)
