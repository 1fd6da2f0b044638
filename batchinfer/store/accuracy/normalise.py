"""Normalises texts for comparison: spelling differences do not count.

A text is normalised in these steps: Unicode NFKC and case folding, until neither changes it (The Unicode Standard,
3.13, and Standard Annex 15); white space is removed at both ends, and collapsed to single spaces within; then,
repeatedly, punctuation at the end is removed (`. , ; : ! ?` and the ideographic full stop and comma), and a pair of
quotes, brackets or marks of emphasis around the whole text.

SQuAD's normalisation (Rajpurkar et al. 2016) also removes all other punctuation and the articles a, an, the. That would
make C, C++ and C# equal, as well as 5 and -5, and would leave nothing of the label A.
"""

from __future__ import annotations

from unicodedata import normalize

_ENDS = ".,;:!?。、"
_PAIRS = frozenset(['""', "''", "``", "**", "__", "“”", "„“", "‘’", "‚‘", "«»", "»«", "()", "[]", "{}"])


def normalise(text: str) -> str:
    """Return a text without the differences of spelling that comparisons ignore.

    Case and white space are folded. Punctuation at the end, and quotes around the text, are removed unless
    that leaves an empty text.
    """
    said = " ".join(_fold_case(text).split())
    while (inner := _strip_end(said)) and inner != said:
        said = inner
    return said


def _fold_case(text: str) -> str:
    if text.isascii():
        return text.lower()
    while (again := normalize("NFKC", normalize("NFKC", text).casefold())) != text:
        text = again
    return text


def _strip_end(said: str) -> str:
    without = said.rstrip(_ENDS).rstrip()
    if without != said:
        return without
    return said[1:-1].strip() if said[:1] + said[-1:] in _PAIRS and len(said) > 1 else said
