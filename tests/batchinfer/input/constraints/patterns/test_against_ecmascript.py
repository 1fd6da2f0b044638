"""Tests that patterns match like a real ECMAScript engine, or are rejected."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field

from llguidance import LLMatcher

from batchinfer.core.sampling import SamplingParams
from batchinfer.input.constraints.grammar import LIMITS, BadConstraint, grammar_of
from tests.batchinfer.input.constraints.patterns.drawn_patterns import DrawnPattern
from tests.batchinfer.input.constraints.patterns.ecmascript import matches
from tests.batchinfer.input.constraints.random_schemas import library
from tests.examples import examples

TEXTS, WALKS, STEPS = 30, 4, 30
# Why an ECMAScript pattern may be rejected: it is unsupported, or its author probably meant something else
LIMITED = (
    *(
        "cannot be followed",
        "write ^ first",
        "must be last",
        "write ^ and $ outside",
        "halves of surrogate pairs",
    ),
    "half of a surrogate pair",
    *("is no intersection", "write the characters themselves", "sets flags", "names a second group"),
    *("no answer can follow it", "takes too much work", "Regex is empty", "Unable to determine"),
)


@dataclass
class Compared:
    """Counts of comparisons, and the differences found."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, ...]] = field(default_factory=list)

    def pattern(self, drawn: DrawnPattern, seed: int) -> None:
        pattern = drawn.pattern()
        if pattern:  # an empty one is no constraint
            self._kind(pattern, drawn, seed, searched=False)
        self._kind(pattern, drawn, seed, searched=True)

    def _kind(self, pattern: str, drawn: DrawnPattern, seed: int, searched: bool) -> None:
        ours = compiled(pattern, searched)
        ecma = pattern if searched else f"^(?:{pattern})$"
        known = matches(pattern, []) is not None
        if isinstance(ours, str):
            if known and not any(one in ours for one in LIMITED):
                self.wrong.append((pattern, "refused", ours))
            return
        if not known:
            return self.wrong.append((pattern, "accepted, and is no expression"))
        self.counts["followed"] += 1
        texts = [drawn.text() for _ in range(TEXTS)]
        for text, right in zip(texts, matches(ecma, texts) or [], strict=True):
            self.counts["matched"] += right
            found = accepts(ours, written(text) if searched else text.encode())
            if found != right and not (right and searched and "\0" in text):
                self.wrong.append((pattern, text, f"{found} instead of {right}", str(searched)))
        self._walks(pattern, ecma, ours, random.Random(seed), searched)

    def _walks(self, pattern: str, ecma: str, ours: LLMatcher, draw: random.Random, searched: bool) -> None:
        walked = [one for _ in range(WALKS) if (one := walk(ours, draw)) is not None]
        texts = [json.loads(one) if searched else one.decode() for one in walked]
        self.counts["walks"] += len(texts)
        for text, right in zip(texts, matches(ecma, texts) or [], strict=True):
            if not right:
                self.wrong.append((pattern, text, "walked", str(searched)))


def compiled(pattern: str, searched: bool) -> LLMatcher | str:
    """Return the compiled constraint, or the message of its refusal."""
    schema = json.dumps({"type": "string", "pattern": pattern})
    params = SamplingParams(json_schema=schema) if searched else SamplingParams(regex=pattern)
    try:
        made = LLMatcher(library(), grammar_of(params), log_level=0, limits=LIMITS)
    except BadConstraint as error:
        return str(error)
    return str(made.get_error()) if made.is_error() else made


def written(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode()


def accepts(ours: LLMatcher, data: bytes) -> bool:
    one = ours.deep_copy()
    return bool(one.try_consume_tokens(list(data)) == len(data) and one.is_accepting())


def walk(ours: LLMatcher, draw: random.Random) -> bytes | None:
    """Return the bytes of a random walk over the mask, or None if it did not end in time."""
    one, data = ours.deep_copy(), bytearray()
    for _ in range(STEPS):
        if one.is_accepting() and (draw.random() < 0.4 or one.is_stopped()):
            return bytes(data)
        allowed = [at for at, bias in enumerate(one.compute_logit_bias()[:256]) if bias]
        if not allowed:
            return None
        few = [at for at in allowed if at < 0x21 or at in b'"\\' or at >= 0x7F]
        byte = draw.choice(few if few and draw.random() < 0.5 else allowed)
        if not one.consume_token(byte):
            return None
        data.append(byte)
    return None


def test_random_patterns_match_what_ecmascript_matches() -> None:
    found = Compared()
    for seed in range(examples(150, 4_000)):
        found.pattern(DrawnPattern(seed, beyond=0.0 if seed % 2 else 0.2), seed)
    assert not found.wrong, found.wrong[:5]
    assert found.counts["followed"] > 150
    assert found.counts["matched"] > 500
    assert found.counts["walks"] > 200
