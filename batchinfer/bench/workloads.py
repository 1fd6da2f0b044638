"""The built-in workloads: rows of token ids, which are the same on every machine and Python version.

Ids are drawn by `random.Random` with a fixed seed from a vocabulary of 32,000. For models with fewer tokens, ids are
mapped into their vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from batchinfer.core.errors import UsageError

FIRST_ID, VOCAB = 300, 32_000  # ids 300 … 31,999: most vocabularies have their special tokens below 300
QUESTIONS = 16  # per document, in prefix-tree
PREAMBLE, DOCUMENT = 64, 256  # tokens
DUPLICATE_SHARE = 0.4
LONG_TAIL = 20  # times the median


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a workload, for which exactly `max_tokens` tokens are generated greedily.

    Attributes:
        prompt: Token ids of the prompt.
        max_tokens: Number of output tokens.
        schema: JSON text of a JSON Schema for the answer, or None.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    schema: str | None = None

    @property
    def length(self) -> int:
        """Return the number of tokens of prompt and output."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of rows, in an order that a user's input could have.

    Attributes:
        name: The name of the workload, such as "mixed".
        rows: The rows.
    """

    name: str
    rows: tuple[Row, ...]

    @property
    def prompt_tokens(self) -> int:
        """Return the number of prompt tokens of all rows."""
        return sum(len(row.prompt) for row in self.rows)

    @property
    def output_tokens(self) -> int:
        """Return the number of output tokens of all rows."""
        return sum(row.max_tokens for row in self.rows)

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest row, prompt and output together."""
        return max(row.length for row in self.rows)

    @property
    def duplicates(self) -> int:
        """Return the number of rows that repeat an earlier row."""
        return len(self.rows) - len(set(self.rows))


def make_workload(name: str, vocab: int, rows: int | None = None, most_out: int | None = None) -> Workload:
    """Return a built-in workload by its name.

    Args:
        name: The name of the workload.
        vocab: The vocabulary size of the model.
        rows: The number of rows; None: the default of the workload. A smaller shared-prefix, mixed, decode, prefix-tree
            or long-context workload has the first rows of a larger one.
        most_out: The maximum number of output tokens per row; None: no limit.

    Raises:
        UsageError: The name is unknown, or `rows` < 1.
    """
    if name not in WORKLOADS:
        raise UsageError(f"unknown workload {name!r}; it can be {', '.join(WORKLOADS)}")
    if rows is not None and rows < 1:
        raise UsageError(f"--rows is {rows}; at least 1 is needed")
    make, size = WORKLOADS[name]
    made = (_folded(row, vocab) for row in make(size if rows is None else rows))
    return Workload(name, tuple(row if most_out is None else _truncate(row, most_out) for row in made))


def _truncate(row: Row, most_out: int) -> Row:
    return replace(row, max_tokens=min(row.max_tokens, most_out))


def _folded(row: Row, vocab: int) -> Row:
    # Equal prompts stay equal, and neighbouring ids stay different
    if vocab >= VOCAB:
        return row
    first = min(FIRST_ID, vocab // 2)
    return replace(row, prompt=tuple(first + (i - FIRST_ID) % (vocab - first) for i in row.prompt))


def _ids(r: random.Random, count: int) -> tuple[int, ...]:
    return tuple(r.randrange(FIRST_ID, VOCAB) for _ in range(count))


def shared_prefix(rows: int) -> list[Row]:
    """Return rows whose prompts begin with the same 512 tokens.

    After them, each prompt has 32 … 128 tokens of its own. A row has 8 output tokens.
    """
    r = random.Random(1)
    prefix = _ids(r, 512)
    return [Row(prefix + _ids(r, r.randint(32, 128)), 8) for _ in range(rows)]


def mixed(rows: int) -> list[Row]:
    """Return rows with prompts of 16 … 1024 and outputs of 8 … 256 tokens, both log-uniform."""
    r = random.Random(2)

    def length(low: int, high: int) -> int:
        return round(math.exp(r.uniform(math.log(low), math.log(high))))

    return [Row(_ids(r, length(16, 1024)), length(8, 256)) for _ in range(rows)]


def decode(rows: int) -> list[Row]:
    """Return rows with 32 prompt tokens and 128 output tokens."""
    r = random.Random(3)
    return [Row(_ids(r, 32), 128) for _ in range(rows)]


def prefix_tree(rows: int) -> list[Row]:
    """Return rows with questions about documents, 16 questions per document, with 16 output tokens each.

    A prompt is 64 tokens that all rows share, a document of 256 tokens, and a question of 16 … 48 tokens. Different
    documents differ in their first token, and so do different questions, so that shared prefixes have these lengths.
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
    """Return rows with 32 prompt tokens and 128 output tokens; 40 % of the rows repeat another row."""
    r = random.Random(5)
    repeated = round(rows * DUPLICATE_SHARE)
    own = [Row(_ids(r, 32), 128) for _ in range(rows - repeated)]
    found = own + [r.choice(own) for _ in range(repeated)]
    r.shuffle(found)
    return found


def long_tail(rows: int) -> list[Row]:
    """Return rows with 32 prompt tokens and 24 … 40 output tokens; one row has 20 times the median of output tokens."""
    r = random.Random(6)
    found = [Row(_ids(r, 32), r.randint(24, 40)) for _ in range(rows)]
    middle = len(found) // 2
    # The long row is above the median, so its original length does not matter
    outputs = sorted(row.max_tokens for n, row in enumerate(found) if n != middle)
    median = outputs[(rows - 1) // 2] if rows > 1 else found[0].max_tokens
    found[middle] = replace(found[middle], max_tokens=LONG_TAIL * median)
    return found


def long_context(rows: int) -> list[Row]:
    """Return rows with 2,048 … 4,096 prompt tokens and 64 output tokens.

    Their decode steps are bound by reading the KV cache.
    """
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


def distinct(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows without duplicates, in order of first appearance."""
    return tuple(dict.fromkeys(rows))
