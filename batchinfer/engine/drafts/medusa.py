"""Medusa heads (Cai et al., 2024, arXiv:2401.10774) propose trees of drafts: each head, a token further away.

The heads were trained for the job's model, and read its hidden states.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear, silu

from batchinfer.core.samples import DraftName
from batchinfer.engine.drafts.acceptance import NodeAcceptance
from batchinfer.engine.drafts.source import MOST_DRAFTS
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.runner.kept_states import KeptStates
from batchinfer.engine.runner.sampler import LogitsHead
from batchinfer.engine.schedule.draft_tree import DraftTree, without_chain
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.models.heads.stored_medusa import StoredMedusa
from batchinfer_kernels.cost import Cost, Peaks

MOST_ROWS = 256  # that they are asked about at a time
RANKS = 8  # candidates of a head, the likeliest ones
_NEWEST = 0.2  # the weight of what the newest proposals took
# The share of what they took longer than their bound that a step forgets: a slow proposal would else be the last
_FORGOTTEN = 0.01
# Before any was verified: how likely a head's first candidate is to be right, and each further one where those before
# it are wrong
_BELIEVED, _BELIEVED_NEXT = 0.75, 0.5


class TreeShape(NamedTuple):
    """The nodes of a tree, the likeliest first: so its first nodes are the best tree of so many."""

    parents: list[int]  # -1: the sequence's last token
    depths: list[int]  # from 0 on
    ranks: list[int]  # which candidate of its place each node is, 0 for the likeliest
    chances: list[float]  # that it is right, and its ancestors

    def first(self, count: int) -> TreeShape:
        """Return the best tree of so many nodes."""
        return TreeShape(self.parents[:count], self.depths[:count], self.ranks[:count], self.chances[:count])


def best_shape(rates: Seq[Seq[float]], most: int) -> TreeShape:
    """Return the tree of up to `most` nodes of which the most are expected to be right (Cai et al., 2024, 2.1.2).

    rates: for each place behind the last token, how likely each of its candidates is to be right where the tokens
    before it are. A node is right with the product of those on its path.
    """
    orders = [sorted(range(len(own)), key=own.__getitem__, reverse=True) for own in rates]
    shape, waiting = TreeShape([], [], [], []), list[tuple[float, int, int, int, float]]()

    def put(depth: int, place: int, parent: int, before: float) -> None:
        """Have the candidate at this place of its depth's order wait, behind a node with this chance."""
        if depth < len(rates) and place < len(rates[depth]):
            chance = before * rates[depth][orders[depth][place]]
            heappush(waiting, (-chance, depth, place, parent, before))

    put(0, 0, -1, 1.0)
    while waiting and len(shape.parents) < most:
        negative, depth, place, parent, before = heappop(waiting)
        node = len(shape.parents)
        shape.parents.append(parent)
        shape.depths.append(depth)
        shape.ranks.append(orders[depth][place])
        shape.chances.append(-negative)
        put(depth, place + 1, parent, before)
        put(depth + 1, 0, node, -negative)
    return shape


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """The weights of a head: residual blocks, (hidden, hidden) and (hidden,) each, and the logits', (vocab, hidden)."""

    blocks: list[tuple[Tensor, Tensor]]
    out: Tensor

    def tokens(self, states: Tensor, ranks: int) -> Tensor:
        """Return the tokens with the greatest logits, in descending order: states (n, hidden) → (n, ranks) int64."""
        for weight, bias in self.blocks:
            states = states + silu(linear(states, weight, bias))
        logits = linear(states, self.out)
        return logits.argmax(-1, keepdim=True) if ranks == 1 else logits.topk(ranks).indices


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHeads:
    """Heads on their device. The model's own head says which token follows a state, and head i the one that is i + 2
    places behind the state's."""

    heads: list[_Head]

    @classmethod
    def load(cls, stored: StoredMedusa, dtype: torch.dtype, device: torch.device) -> MedusaHeads:
        """Load all of them, in the dtype of their model."""
        with safe_open(str(stored.weights), framework="pt", device="cpu") as file:
            heads = []
            for head in range(stored.count):
                *blocks, out = (file.get_tensor(name).to(device, dtype) for name, _ in stored.names(head))
                heads.append(_Head(list(zip(blocks[::2], blocks[1::2], strict=True)), out))
        return cls(heads)

    @torch.inference_mode()
    def tokens(self, states: Tensor, count: int, ranks: int = 1) -> Tensor:
        """Return the likeliest tokens of each of the first `count` heads: states behind the final norm, (n, hidden) →
        (n, count, ranks) int64."""
        return torch.stack([head.tokens(states, ranks) for head in self.heads[:count]], 1)


@dataclass(frozen=True, slots=True, eq=False)
class HeadsRunner:
    """Heads that are ready to run, and where they find the hidden states of their model."""

    heads: MedusaHeads
    model: LogitsHead
    states: KeptStates
    head_values: int  # of one of them
    itemsize: int
    branches: bool = False  # whether what is proposed of a row may be a tree

    def cost(self, rows: int, count: int) -> Cost:
        """Return what the first `count` heads cost for so many rows."""
        values = count * self.head_values
        return Cost(2 * rows * values, values * self.itemsize)


class HeadsBeside:
    """Proposes tokens of each head: those behind the last token that a row got, by the state from which that one was
    sampled. So nothing is run for a row but the heads themselves; penalties, biases and draws are not looked at.

    They are the tree of which the most tokens are expected to be right, by how often each candidate of each head was so
    far, of as many nodes as pay by what steps took; without `branches` the likeliest one of each head.
    """

    name: DraftName = "heads"
    most_rows = MOST_ROWS

    def __init__(
        self, runner: HeadsRunner, peaks: Peaks, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._runner, self._peaks, self._clock = runner, peaks, clock
        self._ratio: float | None = None  # how much longer than its bound the newest proposals took
        self._acceptance = NodeAcceptance()
        self._shape: TreeShape | None = None  # the best one, by what is counted now

    @property
    def most_proposed(self) -> int:
        """The most tokens that it proposes of a row."""
        return len(self.shape.parents)

    @property
    def shape(self) -> TreeShape:
        """The best tree of all that it may propose; see `best_shape`."""
        if self._shape is None:
            heads = len(self._runner.heads.heads)
            ranks, most = (RANKS, MOST_DRAFTS) if self._runner.branches else (1, heads)
            self._shape = best_shape([self._rates(head, ranks) for head in range(heads)], most)
        return self._shape

    def _rates(self, head: int, ranks: int) -> list[float]:
        """Return how likely the candidates of a head are to be right, where the tokens before them are."""
        rates = [self._acceptance.rate((head, 0), _BELIEVED)]
        for rank in range(1, ranks):
            believed = max(0.0, 1 - sum(rates)) * _BELIEVED_NEXT
            rates.append(self._acceptance.rate((head, rank), believed))
        return rates

    def expected(self, rate: float, count: int) -> float:
        """Return how many of `count` tokens that it proposes of a row are expected to be right."""
        return sum(self.shape.chances[:count])

    def verified(self, tree: DraftTree, taken: AcceptedTokens) -> None:
        """Count the candidates of each head that were right."""
        self._acceptance.verified(tree, taken)
        self._shape = None

    def fade(self, share: float) -> None:
        """Forget a share of what was counted."""
        self._acceptance.fade(share)
        self._shape = None
        if self._ratio is not None:
            self._ratio += _FORGOTTEN * (min(1.0, self._ratio) - self._ratio)

    def _heads(self, count: int) -> int:
        """Count the heads that give the first tokens of the best tree."""
        return 1 + max(self.shape.depths[:count])

    def takes(self, row: Sequence) -> bool:
        """Whether its last token was sampled from a state that is known: it is not where it had to come."""
        return self._runner.states.has(row.request.key, row.output_length)

    def seconds(self, rows: Seq[Sequence], count: int) -> float:
        """Return about how long it takes to propose `count` tokens of each of these rows."""
        return self._least_s(len(rows), self._heads(count)) * (self._ratio or 1.0)

    def propose(self, rows: Seq[Sequence], count: int) -> list[DraftTree]:
        """Return up to `count` tokens that may follow each of these rows, which `takes`."""
        began, states = self._clock(), self._runner.states
        hidden = states.of([(row.request.key, row.output_length) for row in rows])
        shape = self.shape.first(count)
        heads, ranks = self._heads(count), 1 + max(shape.ranks)
        candidates = self._runner.heads.tokens(self._runner.model.states(hidden), heads, ranks)
        tokens = candidates.cpu()[:, shape.depths, shape.ranks].tolist()
        self.measured(len(rows), heads, self._clock() - began)
        parents, kinds = without_chain(shape.parents), list(zip(shape.depths, shape.ranks, strict=True))
        return [DraftTree(own, parents, shape.chances, kinds) for own in tokens]

    def measured(self, rows: int, heads: int, took_s: float) -> None:
        """Take the time in which so many heads proposed for so many rows."""
        found = took_s / self._least_s(rows, heads)
        before = self._ratio or found
        self._ratio = before + _NEWEST * (min(found, 2 * before) - before)

    def ended(self, row: Sequence) -> None:
        """Forget a row."""
        self._runner.states.forget(row.request.key)

    def _least_s(self, rows: int, heads: int) -> float:
        return self._runner.cost(rows, heads).seconds(self._peaks)
