"""Splits a template into parts, such as paragraphs, that could be in another order."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import jinja2

from batchinfer.input.prompts.builder import template_columns
from batchinfer.input.prompts.chat_template import row_environment

_OPENING, _CLOSING = frozenset({"for", "if"}), frozenset({"endfor", "endif"})
_MOVABLE = _OPENING | _CLOSING | {"elif", "else"}  # other statements may define names that later parts use
_BEGINS_SOMETHING = re.compile(r"(:|<[^/>][^>]*>)\s*$")  # a label or an opening tag belongs to the next line
# A shorter text has fewer than the 16 tokens of a block, so it cannot be shared
_LONG_TAIL = re.compile(r"[}%]\}[^\w\s{]*\s+(?P<tail>(?:(?![{%]\}|\{[{%]).){60,})\Z")
_ENDS_SOMETHING = re.compile(r"^\s*</[^>]+>\s*$")


@dataclass(frozen=True, slots=True)
class TemplatePart:
    """Consecutive lines of a template that belong together, such as a paragraph.

    Args:
        source: The lines.
        first_line: The number of the first line in the template, from 1.
        columns: The columns that the lines read. Without any, the lines are the same for all rows.
    """

    source: str
    first_line: int
    columns: tuple[str, ...]

    @property
    def last_line(self) -> int:
        """The number of the part's last line in the template, from 1."""
        return self.first_line + self.source.count("\n")

    @property
    def is_label(self) -> bool:
        """True if the part is fixed text that ends with a label such as `Answer:`. The next part must stay after it."""
        return not self.columns and _BEGINS_SOMETHING.search(self.source) is not None


def template_parts(source: str) -> list[TemplatePart] | None:
    """Split a template into the parts whose order a user could change, and return them in their present order.

    Reordering can make prompts share longer prefixes.

    Returns:
        None if the lines cannot be reordered: the template defines names, trims white space, or is invalid.
    """
    try:
        lines = _lines(source)
        found = None if lines is None else list(_join_lines(list(_split_long_tails(lines))))
        if found is None:
            return None
        return [TemplatePart(text, first, tuple(sorted(template_columns(text)))) for first, text in found]
    except jinja2.TemplateSyntaxError:
        return None


def join_parts(parts: list[TemplatePart], source: str) -> str:
    """Join parts to the text of a template.

    Args:
        parts: The parts, in any order.
        source: The original template. If it has blank lines, blank lines separate the parts.
    """
    return ("\n\n" if "\n\n" in source else "\n").join(part.source for part in parts)


def _lines(source: str) -> list[str] | None:
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


def _split_long_tails(lines: list[str]) -> Iterator[tuple[int, str]]:
    # A long text after the last field of a line becomes a line of its own
    number = 1
    for line in lines:
        tail = _LONG_TAIL.search(line)
        yield number, line if tail is None else line[: tail.start("tail")].rstrip()
        if tail is not None:
            yield number + line.count("\n"), tail["tail"]
        number += 1 + line.count("\n")


def _join_lines(lines: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
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
