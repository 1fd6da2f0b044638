"""Prints the messages in the source, with their places: `python -m tests.messages [FILE...]`.

A message is a string of at least four words that is neither a docstring nor SQL. Expressions in it are shown
as {…}.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("batchinfer", "kernels")
LEAST_WORDS = 4
SQL = ("SELECT ", "COPY ", "CREATE ", "WITH ", "FROM ", "INSERT ", "CAST(")


class Message(NamedTuple):
    """A message and its line."""

    line: int
    text: str


def messages(source: str) -> Iterator[Message]:
    """Yield the messages of a file in the order of their lines."""
    tree = ast.parse(source)
    ignored = {id(node) for node in _docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            ignored.update(map(id, node.values))
    found = [
        Message(node.lineno, " ".join(_text(node).split()))
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in ignored
    ]
    for message in sorted(found):
        if len(message.text.split()) >= LEAST_WORDS and not message.text.startswith(SQL):
            yield message


def _docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _text(node: ast.JoinedStr | ast.Constant) -> str:
    """Return a string with its expressions in braces, or "" for another constant."""
    if isinstance(node, ast.Constant):
        return ascii(node.value)[1:-1] if isinstance(node.value, str) else ""
    return "".join(
        f"{{{ast.unparse(one.value)}}}" if isinstance(one, ast.FormattedValue) else _text(one)
        for one in node.values
        if isinstance(one, ast.FormattedValue | ast.Constant)
    )


def main() -> None:
    """Print the messages of the given files, or of all product files."""
    given = [Path(name) for name in sys.argv[1:]]
    for path in given or sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for message in messages(path.read_text("utf-8")):
            print(f"{path.resolve().relative_to(ROOT)}:{message.line}: {message.text}")


if __name__ == "__main__":
    main()
