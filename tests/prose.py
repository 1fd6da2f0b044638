"""Finds phrases that make prose hard to read, in docs, docstrings, comments and messages.

`python -m tests.prose FILE...` lists them. Most patterns match a construction that a reader has to read twice ("what it
holds", "of which", "behind it"); the others are single phrases with a plainer equivalent. Each match is printed with a
better wording.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# What a free relative clause begins after, and the words that may follow its "what"
_BEFORE = (
    r"(?:^|[.;:,(] ?"
    r"|\b(?:of|and|or|with|by|from|for|than|is|are|but|so|see|say|return|keep|note|learn|count|to) )"
)
_AFTER = (
    "is are was were has have had it they comes came follows can cannot may could would the a an one no each all its "
    "their does do did runs this that these others some rows lies stands"
)
_WHERE = (
    "is are can has have does do was were may cannot takes pays lack lacks",
    "it they that there this one a the each none all no some",
)


def _any(words: str) -> str:
    return f"(?:{'|'.join(words.split())})"


PATTERNS = {
    "so many": r"\bso (?:many|much|often)\b|\bso long\b(?! as)",
    "as many as": r"\bas (?:far|many|much|long) as\b",
    "in the mean": r"\bin the mean\b",
    "is told": r"\b(?:is|are|was|were|be|been|not) told\b|\btold apart\b|\bhears of\b",
    "behind (after)": r"\bbehind (?:it|them|that|each|a|an|the|these|this|which|drafts|others|\w+ that)\b",
    "beside (in addition to)": r"\bbesides? (?:the|it|them|a|an|that|others|each|those|which|its|another)\b",
    "what it is": rf"{_BEFORE}[Ww]hat {_any(_AFTER)}\b",
    "of which": r"\bof (?:which|whom|whose)\b|\bto which\b",
    "where it is": rf"\bwhere(?:ver)? {_any(_WHERE[1])} {_any(_WHERE[0])}\b",
    "it pays": r"\b(?:it|they|that|this|drafts|waiting|asking) pays?\b|\bpays off\b",
    "nobody": r"\bnobody\b|\banybody\b|\bwhoever\b|\bwho (?:waits|asks|reads|wants|has|looks)\b",
    "any more": r"\bany more\b|\bno more\b",
    "one after the other": (
        r"\b(?:one|another) (?:after|behind|beside) (?:the other|another)\b"
        r"|\bone of (?:each|these|those|them|several)\b"
    ),
    "comes to": r"\bcomes? to\b|\bcame to\b",
    "now and then": r"\bnow and then\b",
    "lies in": (
        r"\b(?:lies?|lay|stands?|stood) "
        r"(?:in|at|beside|behind|before|where|there|here|within|on|how|the|so)\b"
    ),
    "gives back": r"\bgive[sn]? back\b|\blets? go\b|\btaken? back\b|\btakes? over\b|\btaken over\b",
    "anew": r"\banew\b|\bmeanwhile\b|\bhitherto\b|\bthereby\b|\btherein\b|\bthereof\b",
    "apart from": r"\bbut for\b|\bapart from\b|\bsave for\b|\ball but\b",
    "is to be": r"\b(?:is|are|was|were) to (?:be|run|have|come|get|wait|write|read|say|know|make|find)\b",
    "at the most": r"\bat (?:the|its) (?:least|most)\b",
    "those that": (
        r"\bthose (?:that|of|which|who|behind|before|beside|with)\b"
        r"|\bthat of (?:the|a|an|its|each|which|this|that)\b"
    ),
    "most rows": (
        r"\b(?:[Mm]ost|[Ll]east) "
        r"(?:tokens|rows|bytes|drafts|seconds|characters|places|blocks|requests|answers)\b"
    ),
    "of one kind": r"\bof (?:one|two|several|a) (?:kind|kinds|sort|piece)\b",
    "likewise": (
        r"\blikewise\b|\breckon|\bin the place of\b|\bby and by\b|\blaborious\b|\bdearest\b|\bwhere that pays\b"
        r"|\bnone is\b|\bmakes of\b|\bgets none\b|\bstands? for\b|\bhas stood\b|\bas it is said\b|\bonce more\b"
    ),
}
# A better wording for a pattern
BETTER = {
    "so many": "a number, `n`, or that many",
    "as many as": "at most, at least, equal to, or up to",
    "in the mean": "on average, or the mean number of",
    "is told": "receives, is passed, is notified",
    "behind (after)": "after",
    "beside (in addition to)": "in addition to, alongside, or in parallel",
    "what it is": "name the thing: the value, the rows, the duration",
    "of which": "two sentences, or a noun",
    "where it is": "if, or when",
    "it pays": "is faster, or is worth its cost",
    "nobody": "no user, no process; or name who does not",
    "any more": "no longer, or delete it",
    "one after the other": "in order, or sequentially",
    "comes to": "reaches, amounts to, or starts",
    "now and then": "periodically, or every n seconds",
    "lies in": "is in",
    "gives back": "returns, frees, releases, or reuses",
    "anew": "again, from the start; rebuild",
    "apart from": "except, or separate",
    "is to be": "must, or will",
    "at the most": "at most, at least",
    "those that": "repeat the noun",
    "most rows": "the maximum number of, or the minimum number of",
    "of one kind": "the same",
    "likewise": "a plain word: also, estimate, expensive, again, is, means",
}
_EACH = {name: re.compile(pattern) for name, pattern in PATTERNS.items()}
_ANY = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS.values()))
# Shorter strings in code are names and keys, not sentences
_SENTENCE = re.compile(r"""(["'])((?:(?!\1).){16,})\1""")


class Hit(NamedTuple):
    """A line of a file that matches patterns."""

    path: Path
    line: int
    patterns: tuple[str, ...]
    text: str


def hits(path: Path) -> Iterator[Hit]:
    """Yield the lines of prose in a Markdown or Python file that match any pattern."""
    prose = _of_markdown if path.suffix == ".md" else _of_python
    for number, text in prose(path.read_text("utf-8").splitlines()):
        if _ANY.search(text):
            matched = tuple(name for name, pattern in _EACH.items() if pattern.search(text))
            yield Hit(path, number, matched, text.strip())


def _of_markdown(lines: list[str]) -> Iterator[tuple[int, str]]:
    in_code = False
    for number, line in enumerate(lines, 1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, line


def _of_python(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield docstrings, comments and strings line by line. Parsing and tokenising would take ten times as long."""
    in_docstring = False
    for number, line in enumerate(lines, 1):
        quotes = line.count('"""')
        if in_docstring or quotes:
            yield number, line
        else:
            code, mark, comment = line.partition("# ")
            strings = " ".join(match[1] for match in _SENTENCE.findall(code))
            if mark or strings:
                yield number, f"{strings} {comment}".strip()
        in_docstring ^= quotes % 2 == 1


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for hit in hits(Path(argument)):
            better = "; ".join(f"{name} -> {BETTER[name]}" for name in hit.patterns)
            print(f"{hit.path}:{hit.line}: {better}: {hit.text}")
