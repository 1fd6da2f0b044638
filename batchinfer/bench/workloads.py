"""The built-in workloads: rows of token ids, the same on every machine and in every version of Python.

Only `random.Random` with a fixed seed draws, and always over a vocabulary of 32,000: models of at least that many
tokens get the very same ids, smaller ones the same lengths with ids folded into their vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from batchinfer.core.errors import UsageError

FIRST_ID, VOCAB = 300, 32_000  # ids 300 … 31,999: special tokens lie below in most vocabularies
QUESTIONS = 16  # a document, in prefix-tree
PREAMBLE, DOCUMENT = 64, 256  # tokens
DUPLICATE_SHARE = 0.4
LONG_TAIL = 20  # times the median


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt, and how many tokens to generate after it: exactly so many, greedily."""

    prompt: tuple[int, ...]
    max_tokens: int
    schema: str | None = None  # JSON text of a schema that the answer begins to follow

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """A named table of rows, in the order in which a user would have them."""

    name: str
    rows: tuple[Row, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(row.prompt) for row in self.rows)

    @property
    def output_tokens(self) -> int:
        return sum(row.max_tokens for row in self.rows)

    @property
    def longest(self) -> int:
        """Tokens of prompt and output of the longest row."""
        return max(row.length for row in self.rows)

    @property
    def duplicates(self) -> int:
        """Rows that another row says already."""
        return len(self.rows) - len(set(self.rows))


def make_workload(name: str, vocab: int, rows: int | None = None, most_out: int | None = None) -> Workload:
    """A built-in workload, by default in its own size. Raises UsageError for an unknown name or `rows` < 1.
    `most_out`: no row generates more tokens.

    Fewer or more rows of shared-prefix, mixed, decode, prefix-tree and long-context begin with the same rows.
    """
    if name not in WORKLOADS:
        raise UsageError(f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}")
    if rows is not None and rows < 1:
        raise UsageError(f"--rows is {rows}; at least 1 is needed")
    make, size = WORKLOADS[name]
    made = (_folded(row, vocab) for row in make(size if rows is None else rows))
    return Workload(name, tuple(row if most_out is None else _cut(row, most_out) for row in made))


def _cut(row: Row, most_out: int) -> Row:
    return replace(row, max_tokens=min(row.max_tokens, most_out))


def _folded(row: Row, vocab: int) -> Row:
    """Ids within the vocabulary; equal prompts stay equal, and neighbouring ids stay different."""
    if vocab >= VOCAB:
        return row
    first = min(FIRST_ID, vocab // 2)
    return replace(row, prompt=tuple(first + (i - FIRST_ID) % (vocab - first) for i in row.prompt))


def _ids(r: random.Random, count: int) -> tuple[int, ...]:
    return tuple(r.randrange(FIRST_ID, VOCAB) for _ in range(count))


def shared_prefix(rows: int) -> list[Row]:
    """512 tokens that all rows share, then 32 … 128 of their own; 8 out."""
    r = random.Random(1)
    prefix = _ids(r, 512)
    return [Row(prefix + _ids(r, r.randint(32, 128)), 8) for _ in range(rows)]


def mixed(rows: int) -> list[Row]:
    """Prompts of 16 … 1024 and outputs of 8 … 256 tokens, both log-uniform."""
    r = random.Random(2)

    def length(low: int, high: int) -> int:
        return round(math.exp(r.uniform(math.log(low), math.log(high))))

    return [Row(_ids(r, length(16, 1024)), length(8, 256)) for _ in range(rows)]


def decode(rows: int) -> list[Row]:
    """32 in, 128 out."""
    r = random.Random(3)
    return [Row(_ids(r, 32), 128) for _ in range(rows)]


def prefix_tree(rows: int) -> list[Row]:
    """64 tokens that all rows share, documents of 256 tokens with 16 questions each; 16 out.

    Documents, and the questions about one, differ in their first token: prefixes end where they are meant to.
    """
    r = random.Random(4)
    preamble = _ids(r, PREAMBLE)
    found: list[Row] = []
    for document in range(-(-rows // QUESTIONS)):
        text = (FIRST_ID + document, *_ids(r, DOCUMENT - 1))
        for question in range(QUESTIONS):
            own = (FIRST_ID + question, *_ids(r, r.randint(15, 47)))
            found.append(Row(preamble + text + own, 16))
    return found[:rows]


def duplicates(rows: int) -> list[Row]:
    """`decode`'s sizes; 40 % of the rows repeat an earlier one."""
    r = random.Random(5)
    repeated = round(rows * DUPLICATE_SHARE)
    own = [Row(_ids(r, 32), 128) for _ in range(rows - repeated)]
    found = own + [r.choice(own) for _ in range(repeated)]
    r.shuffle(found)
    return found


def long_tail(rows: int) -> list[Row]:
    """32 in, 24 … 40 out, but for one row, in the middle, whose output is 20 times the median's length."""
    r = random.Random(6)
    found = [Row(_ids(r, 32), r.randint(24, 40)) for _ in range(rows)]
    middle = len(found) // 2
    # whatever its length, it is above the median
    outputs = sorted(row.max_tokens for n, row in enumerate(found) if n != middle)
    median = outputs[(rows - 1) // 2] if rows > 1 else found[0].max_tokens
    found[middle] = replace(found[middle], max_tokens=LONG_TAIL * median)
    return found


def long_context(rows: int) -> list[Row]:
    """2,048 … 4,096 in, 64 out: the KV cache is what a decode step reads."""
    r = random.Random(7)
    return [Row(_ids(r, r.randint(2048, 4096)), 64) for _ in range(rows)]


WORKLOADS: dict[str, tuple[Callable[[int], list[Row]], int]] = {
    "shared-prefix": (shared_prefix, 256),
    "mixed": (mixed, 128),
    "decode": (decode, 128),
    "prefix-tree": (prefix_tree, 256),
    "duplicates": (duplicates, 128),
    "long-tail": (long_tail, 128),
    "long-context": (long_context, 16),
}


def describe(workload: str) -> str:
    """Describe a built-in workload in one line."""
    return " ".join((WORKLOADS[workload][0].__doc__ or "").split("\n\n")[0].split())


def distinct(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Every row once, in order of first appearance."""
    return tuple(dict.fromkeys(rows))
