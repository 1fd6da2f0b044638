"""The ideal job: every shared prefix run once, every duplicate once, work perfectly mixed. Plain integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from batchinfer.bench.workloads import Row, distinct
from batchinfer_kernels.cost import Cost, ModelCost, StepShape


@dataclass(slots=True)
class PrefixNode:
    """Prompt tokens [start, end) that the same rows share, and how many steps read them.

    `longest`: most tokens that one of these rows generates. No batch can need fewer decode steps than that less one.
    """

    start: int
    end: int
    longest: int = 0

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Ideal:
    """The work of the ideal job; pairs and KV tokens are summed over layers."""

    prefill_tokens: int
    decode_tokens: int
    sampled: int
    pairs: int
    kv_tokens: int
    steps: int  # the fewest that there can be: those of the longest output

    @property
    def step(self) -> StepShape:
        """All of it as if it were one step."""
        tokens = self.prefill_tokens + self.decode_tokens
        return StepShape(tokens, self.sampled, self.pairs, self.kv_tokens)


def ideal_job(rows: Sequence[Row], windows: Sequence[int | None]) -> Ideal:
    """`windows`: of each layer how many keys a query sees, None for all.

    In a layer with a window a prefix is read when it is run, and the decodes' reading of it is left out.
    """
    once = distinct(rows)
    nodes = list(prefix_nodes(once))
    pairs = kv_tokens = 0
    for window in windows:
        pairs += sum(attended(n.start, n.end, window) for n in nodes)
        pairs += sum(attended(len(r.prompt), r.length - 1, window) for r in once)
        kv_tokens += sum(n.tokens * (n.longest if window is None else 1) for n in nodes)
        kv_tokens += sum(attended(0, r.max_tokens - 1, window) for r in once)
    return Ideal(
        prefill_tokens=sum(n.tokens for n in nodes),
        decode_tokens=sum(r.max_tokens - 1 for r in once),
        sampled=sum(r.max_tokens for r in once),
        pairs=pairs,
        kv_tokens=kv_tokens,
        steps=max(r.max_tokens for r in once),
    )


def attended(start: int, end: int, window: int | None) -> int:
    """(query, key) pairs of the queries at positions [start, end): each sees itself and what stands before it."""
    if window is None:
        return (end - start) * (start + end + 1) // 2
    whole = min(max(start, window), end)  # from here on a query sees `window` keys
    return attended(start, whole, None) + (end - whole) * window


def ideal_costs(ideal: Ideal, cost: ModelCost) -> dict[str, Cost]:
    """Operator name → its cost over the whole job, each weight read once a step."""
    again = cost.another_step()
    whole = cost.step(ideal.step)
    return {name: cost + again[name] * (ideal.steps - 1) for name, cost in whole.items()}


def prefix_nodes(rows: Sequence[Row]) -> Iterator[PrefixNode]:
    """The compressed trie of the prompts of distinct rows, children before their parents.

    The last token of a prompt always runs, because its logits are needed: rows that have a prompt in common but not
    their output's length share all of it but that token.
    """
    ordered = sorted(rows, key=lambda row: row.prompt)
    shared = [*_shared(ordered), 0]
    open_nodes = [PrefixNode(0, 0)]
    for row, common in zip(ordered, shared, strict=True):
        open_nodes.append(PrefixNode(open_nodes[-1].end, len(row.prompt), row.max_tokens))
        while open_nodes[-1].end > common:
            yield from _closed(open_nodes, common)


def _closed(open_nodes: list[PrefixNode], common: int) -> Iterator[PrefixNode]:
    """Close the innermost node, split where the next row leaves it."""
    node = open_nodes.pop()
    if open_nodes[-1].end < common:
        open_nodes.append(PrefixNode(node.start, common))
    parent = open_nodes[-1]
    parent.longest = max(parent.longest, node.longest)
    yield PrefixNode(parent.end, node.end, node.longest)


def _shared(ordered: Sequence[Row]) -> Iterator[int]:
    """How many prompt tokens each row has in common with the next one."""
    for row, following in pairwise(ordered):
        pairs = zip(row.prompt, following.prompt, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(row.prompt))
        yield min(common, len(following.prompt) - 1)
