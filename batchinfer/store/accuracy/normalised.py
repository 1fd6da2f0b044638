"""Texts as they are compared where spelling does not count.

A text is normalised so: Unicode's NFKC and case folding, until neither changes it (The Unicode Standard, 3.13, and
Standard Annex 15); white space at both ends removed, and within it one space for each run; then, again and again,
punctuation at its end (`. , ; : ! ?` and the ideographic full stop and comma), and a pair of quotes, brackets or marks
of emphasis around all of it.

SQuAD's normalisation (Rajpurkar et al. 2016) also removes all other punctuation and the articles a, an, the: that would
make one label of C, C++ and C#, of 5 and -5, and nothing of the label A.
"""

from __future__ import annotations

from unicodedata import normalize

_ENDS = ".,;:!?。、"
_PAIRS = frozenset(['""', "''", "``", "**", "__", "“”", "„“", "‘’", "‚‘", "«»", "»«", "()", "[]", "{}"])


def normalised(text: str) -> str:
    """Return the text as it is compared. What would leave nothing of it is not removed."""
    said = " ".join(_folded(text).split())
    while (inner := _peeled(said)) and inner != said:
        said = inner
    return said


def _folded(text: str) -> str:
    """Return the text without differences of case and of compatible characters."""
    if text.isascii():
        return text.lower()
    while (again := normalize("NFKC", normalize("NFKC", text).casefold())) != text:
        text = again
    return text


def _peeled(said: str) -> str:
    """Return the text without the punctuation at its end, or else without one pair around it."""
    without = said.rstrip(_ENDS).rstrip()
    if without != said:
        return without
    return said[1:-1].strip() if said[:1] + said[-1:] in _PAIRS and len(said) > 1 else said
