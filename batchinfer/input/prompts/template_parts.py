"""The parts that a template is made of, which stand one below the other and could stand in another order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import jinja2

from batchinfer.input.prompts.builder import template_columns
from batchinfer.input.prompts.chat_template import row_environment

_OPENING, _CLOSING = frozenset({"for", "if"}), frozenset({"endfor", "endif"})
_MOVABLE = _OPENING | _CLOSING | {"elif", "else"}  # others may define what a later part uses
_BEGINS_SOMETHING = re.compile(r"(:|<[^/>][^>]*>)\s*$")  # a label or an opening tag belongs to what follows
# Shorter texts have not the 16 tokens that can be shared
_LONG_TAIL = re.compile(r"[}%]\}[^\w\s{]*\s+(?P<tail>(?:(?![{%]\}|\{[{%]).){60,})\Z")
_ENDS_SOMETHING = re.compile(r"^\s*</[^>]+>\s*$")


@dataclass(frozen=True, slots=True)
class TemplatePart:
    """Lines of a template. `columns` are those that they read; none: the lines are the same for all rows."""

    source: str
    first_line: int  # from 1
    columns: tuple[str, ...]

    @property
    def last_line(self) -> int:
        return self.first_line + self.source.count("\n")

    @property
    def waits(self) -> bool:
        """Whether it asks for what is to follow, as `Answer:` does at the end of a template."""
        return not self.columns and _BEGINS_SOMETHING.search(self.source) is not None


def template_parts(source: str) -> list[TemplatePart] | None:
    """The parts in order; None for a template whose lines cannot change places: it defines something, trims white
    space, or has no valid syntax."""
    try:
        lines = _lines(source)
        found = None if lines is None else list(_joined(list(_cut(lines))))
        if found is None:
            return None
        return [TemplatePart(text, first, tuple(sorted(template_columns(text)))) for first, text in found]
    except jinja2.TemplateSyntaxError:
        return None


def in_order(parts: list[TemplatePart], source: str) -> str:
    """A template of these parts, as far apart as the template had them."""
    return ("\n\n" if "\n\n" in source else "\n").join(part.source for part in parts)


def _lines(source: str) -> list[str] | None:
    """The source cut where a line ends outside of every expression and block."""
    lines, depth, begun = [""], 0, False
    for _, kind, text in row_environment().lex(source):
        if kind.endswith(("_begin", "_end")) and ("-" in text or "+" in text):
            return None
        if kind == "name" and begun:
            if text not in _MOVABLE:
                return None
            depth += (text in _OPENING) - (text in _CLOSING)
        begun = kind == "block_begin" or (begun and kind == "whitespace")
        if kind == "data" and not depth:
            first, *others = text.split("\n")
            lines[-1] += first
            lines += others
        else:
            lines[-1] += text
    return lines


def _cut(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, from 1. Long text behind the last field of a line becomes a line of its own."""
    number = 1
    for line in lines:
        tail = _LONG_TAIL.search(line)
        yield number, line if tail is None else line[: tail.start("tail")].rstrip()
        if tail is not None:
            yield number + line.count("\n"), tail["tail"]
        number += 1 + line.count("\n")


def _joined(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Lines with their labels, and neighbouring lines without columns together; each with the number of its first."""
    held: list[str] = []
    first = 1
    for (number, line), (_, following) in zip(lines, [*lines[1:], (0, "")], strict=True):
        if line.strip() and not held:
            first = number
        if line.strip() or held:
            held.append(line)
        if held and _ends(held, following):
            yield first, "\n".join(held).rstrip("\n")
            held = []
    if held:
        yield first, "\n".join(held).rstrip("\n")


def _ends(held: list[str], following: str) -> bool:
    """Whether a part ends behind these lines."""
    last = next((line for line in reversed(held) if line.strip()), "")
    if _BEGINS_SOMETHING.search(last) and not _varies(last):
        return False
    if _ENDS_SOMETHING.match(following):
        return False
    if any(map(_varies, held)):
        return True
    return _varies(following) or bool(_BEGINS_SOMETHING.search(following))


def _varies(line: str) -> bool:
    return "{{" in line or "{%" in line
