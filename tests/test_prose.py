"""Prose gets no harder to read: for each room, the number of lines that match a pattern of prose.py may only fall."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.prose import BETTER, PATTERNS, hits

ROOT = Path(__file__).parents[1]
FOLDERS = ("batchinfer", "docs", "jobs", "kernels", "tests")
PATTERNS_THEMSELVES = {"prose.py", "test_prose.py"}
# Sentences of the quickstart's orders, as people write them: another wording would change the model and its data
ORDERS = {ROOT / "jobs" / "quickstart" / name for name in ("grammar.py", "held_out.py")}
# Lower a number when you have rewritten lines. A room without a number may have no such line.
CEILINGS = {
    "core": 2,
    "engine": 1,
    "tests": 11,
}


def room(path: Path) -> str:
    """Return the room of a file, such as "engine", or its top-level folder; pages next to README have no folder."""
    parts = path.relative_to(ROOT).parts
    return (
        parts[1] if parts[0] == "batchinfer" and len(parts) > 2 else parts[0] if len(parts) > 1 else "pages"
    )


def test_no_room_gets_more_lines_that_are_hard_to_read() -> None:
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.[mp][dy]"))
    counts: Counter[str] = Counter()
    for path in (*inside, *ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md")):
        if path.name not in PATTERNS_THEMSELVES and path not in ORDERS:
            counts[room(path)] += sum(1 for _ in hits(path))
    more = {name: count for name, count in counts.items() if count > CEILINGS.get(name, 0)}
    assert more == {}, (
        "`git diff --name-only --diff-filter=d | xargs python -m tests.prose` lists the lines of changed files"
    )


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("# Cleared by what it holds.\n", "what it is"),
        ('"""Tokens behind the draft."""\n', "behind (after)"),
        ('raise ValueError("a group of which no row is left")\n', "of which"),
        ('"""Rows.\n\nThe rows, in the mean.\n"""\n', "in the mean"),
    ],
)
def test_docstrings_comments_and_messages_are_searched(text: str, pattern: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(text)
    assert [hit.patterns for hit in hits(tmp_path / "a.py")] == [(pattern,)]


def test_code_is_not_searched(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('anew = told if beside else "in the mean"\n')
    (tmp_path / "a.md").write_text("```\nanew\n```\nAs many as\nas many as four rows\n")
    assert list(hits(tmp_path / "a.py")) == []
    assert [(hit.line, hit.patterns) for hit in hits(tmp_path / "a.md")] == [(5, ("as many as",))]


def test_each_pattern_finds_the_phrase_that_names_it() -> None:
    for name, pattern in PATTERNS.items():
        phrase = name.partition(" (")[0]
        assert re.search(pattern, f"{phrase} the rows that"), name
    assert PATTERNS.keys() == BETTER.keys()
