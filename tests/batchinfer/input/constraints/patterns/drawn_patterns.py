"""Random ECMAScript regular expressions, a few invalid ones, and texts that they may match."""

from __future__ import annotations

import random

# Where dialects part: spaces, ends of lines, letters and digits beyond ASCII, what other cases fold to, and what JSON
# or a regular expression escapes
ODD = [
    *map(chr, (0, 1, 8, 9, 10, 11, 12, 13, 0x1C, 0x1F, 0x20, 0x7F, 0x85, 0xA0, 0x1680, 0x180E, 0x2000)),
    *map(chr, (0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF, 0x212A, 0x17F, 0x301, 0x200D, 0xD7FF, 0xE000)),
    *map(chr, (0x200B, 0xFFFD, 0xFFFF, 0x10000, 0x1D7D9, 0x1F600, 0x1F1E9, 0x10FFFF)),
    *"aäbzAZß_09-/\\\"'^$.*+?()[]{}|&~:,;<>#@!%=` ΩαЯ中あ٣²Ⅷé",
]
_PROPERTIES = [
    *("L", "Lu", "Letter", "Nd", "P", "Zs", "Cc", "C", "S", "gc=Ll", "General_Category=Mn", "Script=Greek"),
    *("ASCII", "Any", "Alphabetic", "White_Space", "Emoji", "ID_Start", "scx=Latn", "sc=Hani"),
]
_ESCAPES = [
    *(r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\n", r"\t", r"\r", r"\f", r"\v", r"\0", r"\cJ", r"\x41"),
    *(r"\u0085", r"\u2028", r"\u{1F600}", r"\ud83d\ude00", r"\x7f", r"\u{0}", r"\/", r"\."),
]
_BEYOND = [
    *("(?i)", "(?i:a)", "(?x)", "(?-u:a)", "(?P<n>a)", "(?P=n)", "(?>a)", "(?#x)", r"\A", r"\z", r"\Z", r"\a"),
    *(r"\h", r"\R", r"\x{41}", r"\pL", r"\p{greek}", r"\p{^L}", r"\p{IsL}", r"\Q", r"\1", r"\2", r"\k<n>", r"\b"),
    *(r"\B", "(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "[[:alpha:]]", "[a-c&&[b]]", "[a--b]", "[a~~b]", "[[a]b]"),
    *("a{,3}", "a++", "a{2}{3}", "{", "}", "]", ")", "(", "[", "\\", "*", "^", "$", "a^", "$a", r"\ud800"),
    *(r"[\ud800-\udfff]", r"[\ud800-\ue000]", r"[^\ud800-\udbff]", r"\u{110000}", r"\u12", r"\x4", r"\08", "[z-a]"),
    *(r"[a-\d]", r"[\w-z]", r"\c1", r"\-", r"\_", r"\ ", r"\<", r"[\-]", r"\é", "(?<a>b)", "(?<a>b)(?<a>c)",
        "(?<1>b)"),
    *("a{3,2}", "(^a)?", "(?:^)*", "(^|b)", "(a|$)", "(?:^|,)", "(?:,|$)", "^^", "$$", r"[\b]", "[^]", "[]", "[a-]"),
    *("[-a]", "[]a]", "[^]]", "[&&]", "[.]", "[[]", r"[\]]", r"[\p{L}-z]", "[:a:]", "(?:", "(?", "(?<", "a|*", "||"),
    *("\ud83d", "a\ud83d", r"\U0001F600", r"\N{DASH}", r"\e", r"\X", r"\K", r"\G", "(?|a|b)", "(?(1)a|b)", "é+",
        "😀?"),
]  # fmt: skip


class DrawnPattern:
    """Draws expressions. `beyond` is the probability of a part that some dialects do not support."""

    def __init__(self, seed: int, beyond: float) -> None:
        self._draw, self._beyond = random.Random(seed), beyond

    def pattern(self) -> str:
        ways = [self._way(self._draw.choice((1, 2, 3))) for _ in range(self._draw.choice((1, 1, 1, 2, 3)))]
        held = [
            ("^" if self._draw.random() < 0.5 else "") + one + ("$" if self._draw.random() < 0.5 else "")
            for one in ways
        ]
        return "|".join(held)

    def text(self) -> str:
        """Return a short text, mostly of unusual characters."""
        return "".join(self._draw.choices(ODD, k=self._draw.choice((0, 1, 1, 1, 2, 2, 3, 5))))

    def _way(self, depth: int) -> str:
        return "".join(self._part(depth) for _ in range(self._draw.choice((0, 1, 1, 2, 3))))

    def _part(self, depth: int) -> str:
        draw = self._draw
        if draw.random() < self._beyond:
            return draw.choice(_BEYOND)
        kind = draw.random()
        if kind < 0.25 and depth > 0:
            made = f"{draw.choice(('(', '(?:', '(?:'))}{self._ways(depth - 1)})"
        elif kind < 0.5:
            made = self._class()
        elif kind < 0.75:
            made = draw.choice([".", *_ESCAPES, self._property()])
        else:
            made = self._literal()
        return made + draw.choice(("", "", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "{0}"))

    def _ways(self, depth: int) -> str:
        return "|".join(self._way(depth) for _ in range(self._draw.choice((1, 1, 2, 3))))

    def _literal(self) -> str:
        char = self._draw.choice(ODD)
        return f"\\{char}" if char in "^$\\.*+?()[]{}|" else char

    def _property(self) -> str:
        return f"\\{self._draw.choice('ppP')}{{{self._draw.choice(_PROPERTIES)}}}"

    def _class(self) -> str:
        members = (self._member() for _ in range(self._draw.choice((0, 1, 2, 3, 4))))
        return f"[{'^' if self._draw.random() < 0.4 else ''}{''.join(members)}]"

    def _member(self) -> str:
        draw = self._draw
        if draw.random() < 0.3:
            return draw.choice([*_ESCAPES, self._property()])
        first, last = sorted(draw.choices(ODD, k=2))
        return self._shown(first) if draw.random() < 0.5 else f"{self._shown(first)}-{self._shown(last)}"

    def _shown(self, char: str) -> str:
        if char in "\\]-^[&":
            return f"\\{char}" if char != "&" else r"\x26"
        return char
