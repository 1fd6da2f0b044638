"""The work of an ideal job: every shared prefix and every duplicate runs once, and steps are perfectly mixed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from batchinfer.bench.workloads import Row, distinct
from batchinfer_kernels.cost import Cost, ModelCost, StepShape


@dataclass(slots=True)
class PrefixNode:
    """A node of the prefix tree of all prompts: the prompt tokens [start, end), which some rows share.

    Attributes:
        start: Index of the node's first token in the prompts.
        end: End of the node's tokens, exclusive.
        longest: Maximum number of output tokens of the rows that share the node.
    """

    start: int
    end: int
    longest: int = 0

    @property
    def tokens(self) -> int:
        """Return the number of prompt tokens of the node."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Ideal:
    """The work of an ideal job, in which each shared prefix and each duplicate is computed once.

    Attributes:
        prefill_tokens: Number of prompt tokens to compute.
        decode_tokens: Number of generated tokens to compute.
        sampled: Number of tokens to sample.
        pairs: Number of attended (query, key) pairs, summed over layers.
        kv_tokens: Number of cached tokens to read, summed over layers.
        steps: Minimum number of steps: the number of tokens of the longest output.
    """

    prefill_tokens: int
    decode_tokens: int
    sampled: int
    pairs: int
    kv_tokens: int
    steps: int

    @property
    def step(self) -> StepShape:
        """Return the work of the whole ideal job as if it were one step."""
        tokens = self.prefill_tokens + self.decode_tokens
        return StepShape(tokens, self.sampled, self.pairs, self.kv_tokens)


def ideal_job(rows: Sequence[Row], windows: Sequence[int | None]) -> Ideal:
    """Return the work of the ideal job for the rows of a workload.

    In layers with a sliding window, decode steps are assumed not to read the prompt, so the work is a lower bound.

    Args:
        rows: The rows of the workload.
        windows: The sliding window of each layer; None: full attention.
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
    """Return the number of (query, key) pairs of causal attention, for the queries at positions [start, end).

    Args:
        start: Position of the first query.
        end: End of the positions, exclusive.
        window: Maximum number of keys that a query attends to, its own included; None: no limit.
    """
    if window is None:
        return (end - start) * (start + end + 1) // 2
    full = min(max(start, window), end)  # from here on, each query attends to `window` keys
    return attended(start, full, None) + (end - full) * window


def ideal_costs(ideal: Ideal, cost: ModelCost) -> dict[str, Cost]:
    """Return the cost of each operator in the whole ideal job, by name. Each step reads the weights once."""
    again = cost.another_step()
    whole = cost.step(ideal.step)
    return {name: cost + again[name] * (ideal.steps - 1) for name, cost in whole.items()}


def prefix_nodes(rows: Sequence[Row]) -> Iterator[PrefixNode]:
    """Yield the nodes of the prefix tree of all prompts, children before parents.

    Rows with equal prompts share all tokens except the last, which each row computes because it needs the logits.

    Args:
        rows: The rows of a workload, without duplicates.
    """
    ordered = sorted(rows, key=lambda row: row.prompt)
    shared = [*_shared(ordered), 0]
    open_nodes = [PrefixNode(0, 0)]
    for row, common in zip(ordered, shared, strict=True):
        open_nodes.append(PrefixNode(open_nodes[-1].end, len(row.prompt), row.max_tokens))
        while open_nodes[-1].end > common:
            yield from _closed(open_nodes, common)


def _closed(open_nodes: list[PrefixNode], common: int) -> Iterator[PrefixNode]:
    node = open_nodes.pop()
    if open_nodes[-1].end < common:
        open_nodes.append(PrefixNode(node.start, common))
    parent = open_nodes[-1]
    parent.longest = max(parent.longest, node.longest)
    yield PrefixNode(parent.end, node.end, node.longest)


def _shared(ordered: Sequence[Row]) -> Iterator[int]:
    for row, following in pairwise(ordered):
        pairs = zip(row.prompt, following.prompt, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(row.prompt))
        yield min(common, len(following.prompt) - 1)
