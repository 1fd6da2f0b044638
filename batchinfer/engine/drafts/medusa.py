"""Medusa heads (Cai et al., 2024, arXiv:2401.10774), which propose draft trees from the target model's hidden states.

Head i predicts the token i + 2 positions after a state's own token. The heads are trained for the target model.
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

from batchinfer.core.samples import DraftSourceName
from batchinfer.engine.drafts.acceptance import NodeAcceptance
from batchinfer.engine.drafts.source import MOST_DRAFTS
from batchinfer.engine.loop.in_flight import AcceptedTokens
from batchinfer.engine.runner.kept_states import KeptStates
from batchinfer.engine.runner.sampler import LogitsHead
from batchinfer.engine.schedule.draft_tree import DraftTree, compact_parents
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.models.heads.stored_medusa import StoredMedusa
from batchinfer_kernels.cost import Cost, Peaks

MOST_ROWS = 256  # maximum rows per query
RANKS = 8  # candidates per head
_NEWEST = 0.2  # weight of the newest proposal in a moving average
# Share of the measured slowness that a step forgets. Otherwise one slow proposal would be the last
_FORGOTTEN = 0.01
# Prior acceptance rates: of a head's first candidate, and of each further one if the candidates before it are rejected
_BELIEVED, _BELIEVED_NEXT = 0.75, 0.5


class TreeShape(NamedTuple):
    """The nodes of a draft tree without their tokens, most likely node first.

    The first n nodes are the best tree with n nodes. All lists have one value per node.

    Attributes:
        parents: The index of the parent node, or -1 for the sequence's last token.
        depths: The index of the Medusa head that predicts the node's token; 0 for a child of the sequence's last
            token.
        ranks: The rank of the node's token among the candidates of its head, 0 for the most likely.
        chances: The probability that the node and all its ancestors are accepted.
    """

    parents: list[int]
    depths: list[int]
    ranks: list[int]
    chances: list[float]

    def first(self, count: int) -> TreeShape:
        """Return the shape of the first `count` nodes, which is the best tree with `count` nodes."""
        return TreeShape(self.parents[:count], self.depths[:count], self.ranks[:count], self.chances[:count])


def best_shape(rates: Seq[Seq[float]], most: int) -> TreeShape:
    """Return the draft tree with the highest expected number of accepted nodes (Cai et al., 2024, section 2.1.2).

    Args:
        rates: `rates[depth][rank]` is the probability that a candidate token is accepted if its ancestors are.
        most: The maximum number of nodes of the tree.
    """
    orders = [sorted(range(len(own)), key=own.__getitem__, reverse=True) for own in rates]
    shape, waiting = TreeShape([], [], [], []), list[tuple[float, int, int, int, float]]()

    def push(depth: int, order: int, parent: int, before: float) -> None:
        if depth < len(rates) and order < len(rates[depth]):
            chance = before * rates[depth][orders[depth][order]]
            heappush(waiting, (-chance, depth, order, parent, before))

    push(0, 0, -1, 1.0)
    while waiting and len(shape.parents) < most:
        negative, depth, order, parent, before = heappop(waiting)
        node = len(shape.parents)
        shape.parents.append(parent)
        shape.depths.append(depth)
        shape.ranks.append(orders[depth][order])
        shape.chances.append(-negative)
        push(depth, order + 1, parent, before)
        push(depth + 1, 0, node, -negative)
    return shape


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """The weights of one Medusa head.

    Attributes:
        blocks: The weight [hidden, hidden] and the bias [hidden] of each residual block.
        out: The output weight, [vocab, hidden].
    """

    blocks: list[tuple[Tensor, Tensor]]
    out: Tensor

    def tokens(self, states: Tensor, ranks: int) -> Tensor:
        for weight, bias in self.blocks:
            states = states + silu(linear(states, weight, bias))
        logits = linear(states, self.out)
        return logits.argmax(-1, keepdim=True) if ranks == 1 else logits.topk(ranks).indices


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHeads:
    """The loaded Medusa heads of a model."""

    heads: list[_Head]

    @classmethod
    def load(cls, stored: StoredMedusa, dtype: torch.dtype, device: torch.device) -> MedusaHeads:
        """Load the weights of all Medusa heads of a checkpoint.

        Args:
            stored: The checkpoint's file of weights, and their names.
            dtype: The dtype of the target model.
            device: The device of the target model.
        """
        with safe_open(str(stored.weights), framework="pt", device="cpu") as file:
            heads = []
            for head in range(stored.count):
                *blocks, out = (file.get_tensor(name).to(device, dtype) for name, _ in stored.names(head))
                heads.append(_Head(list(zip(blocks[::2], blocks[1::2], strict=True)), out))
        return cls(heads)

    @torch.inference_mode()
    def tokens(self, states: Tensor, count: int, ranks: int = 1) -> Tensor:
        """Return the most likely tokens of the first `count` heads.

        Args:
            states: Hidden states of the target model after the final norm, [n, hidden].
            count: The number of heads to run. Head i predicts the token i + 2 positions after the state's own token.
            ranks: The number of tokens per head.

        Returns:
            int64 [n, count, ranks], the most likely token of each head first.
        """
        return torch.stack([head.tokens(states, ranks) for head in self.heads[:count]], 1)


@dataclass(frozen=True, slots=True, eq=False)
class MedusaRunner:
    """Loaded Medusa heads with access to the hidden states of the target model.

    Attributes:
        heads: The Medusa heads.
        model: The target model's final norm and output layer.
        states: The hidden states from which the last tokens of running sequences were sampled.
        head_values: The number of weights per head.
        itemsize: The number of bytes per weight.
        branches: True if proposals may be trees.
    """

    heads: MedusaHeads
    model: LogitsHead
    states: KeptStates
    head_values: int
    itemsize: int
    branches: bool = False

    def cost(self, rows: int, count: int) -> Cost:
        """Return the cost of running the first `count` heads for `rows` hidden states: FLOPs, and bytes of weights."""
        values = count * self.head_values
        return Cost(2 * rows * values, values * self.itemsize)


class MedusaSource:
    """A draft source that runs Medusa heads on the hidden state from which a row's last token was sampled.

    A row is a running sequence. From the measured acceptance rate of each candidate token, the source derives the tree
    with the highest expected number of accepted tokens and proposes it. If the runner allows no branches, the source
    proposes the most likely token of each head. Penalties, logit biases and random draws of the row are ignored.
    """

    name: DraftSourceName = "heads"
    most_rows = MOST_ROWS

    def __init__(
        self, runner: MedusaRunner, peaks: Peaks, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._runner, self._peaks, self._clock = runner, peaks, clock
        self._ratio: float | None = None  # measured duration / roofline bound of proposals
        self._acceptance = NodeAcceptance()
        self._shape: TreeShape | None = None  # a cache, cleared when acceptance changes

    @property
    def most_proposed(self) -> int:
        """The maximum number of proposed tokens per row."""
        return len(self.shape.parents)

    @property
    def shape(self) -> TreeShape:
        """The shape of the draft tree with the highest expected number of accepted tokens.

        It has 24 nodes, or one node per head if the runner allows no branches.
        """
        if self._shape is None:
            heads = len(self._runner.heads.heads)
            ranks, most = (RANKS, MOST_DRAFTS) if self._runner.branches else (1, heads)
            self._shape = best_shape([self._rates(head, ranks) for head in range(heads)], most)
        return self._shape

    def _rates(self, head: int, ranks: int) -> list[float]:
        rates = [self._acceptance.rate((head, 0), _BELIEVED)]
        for rank in range(1, ranks):
            believed = max(0.0, 1 - sum(rates)) * _BELIEVED_NEXT
            rates.append(self._acceptance.rate((head, rank), believed))
        return rates

    def expected(self, rate: float, count: int) -> float:
        """Return the expected number of accepted tokens per row if the tree's first `count` tokens are verified.

        Args:
            rate: Ignored: the source measures the acceptance rate of each candidate itself.
            count: The number of verified tokens.
        """
        return sum(self.shape.chances[:count])

    def record_verified(self, tree: DraftTree, outcome: AcceptedTokens) -> None:
        """Learn the acceptance rate of each head's candidates from a verified tree.

        Args:
            tree: The tree that this source proposed.
            outcome: The result of the step that verified it.
        """
        self._acceptance.record_verified(tree, outcome)
        self._shape = None

    def fade(self, share: float) -> None:
        """Multiply all counts of verified and accepted nodes by 1 - `share`, so that newer results weigh more."""
        self._acceptance.fade(share)
        self._shape = None
        if self._ratio is not None:
            # Without this, a single slow proposal could stop all further ones
            self._ratio += _FORGOTTEN * (min(1.0, self._ratio) - self._ratio)

    def _heads(self, count: int) -> int:
        return 1 + max(self.shape.depths[:count])

    def can_draft(self, row: Sequence) -> bool:
        """Return True if the hidden state from which the row's last token was sampled is available.

        A token that a constraint forced was not sampled, so there is no hidden state for it.
        """
        return self._runner.states.has(row.request.key, row.output_length)

    def seconds(self, rows: Seq[Sequence], count: int) -> float:
        """Return the estimated time to propose `count` tokens for each row, in seconds."""
        return self._least_s(len(rows), self._heads(count)) * (self._ratio or 1.0)

    def propose(self, rows: Seq[Sequence], count: int) -> list[DraftTree]:
        """Run the heads and return the draft tree of each row.

        Args:
            rows: Sequences for which `can_draft` is True.
            count: The number of tokens per tree, from 1 to `most_proposed`.
        """
        began, states = self._clock(), self._runner.states
        hidden = states.of([(row.request.key, row.output_length) for row in rows])
        shape = self.shape.first(count)
        heads, ranks = self._heads(count), 1 + max(shape.ranks)
        candidates = self._runner.heads.tokens(self._runner.model.states(hidden), heads, ranks)
        tokens = candidates.cpu()[:, shape.depths, shape.ranks].tolist()
        self.record_time(len(rows), heads, self._clock() - began)
        parents, kinds = compact_parents(shape.parents), list(zip(shape.depths, shape.ranks, strict=True))
        return [DraftTree(own, parents, shape.chances, kinds) for own in tokens]

    def record_time(self, rows: int, heads: int, took_s: float) -> None:
        """Learn from the measured duration of a proposal.

        Args:
            rows: The number of rows of the proposal.
            heads: The number of heads that ran.
            took_s: The duration in seconds.
        """
        found = took_s / self._least_s(rows, heads)
        before = self._ratio or found
        self._ratio = before + _NEWEST * (min(found, 2 * before) - before)

    def finish(self, row: Sequence) -> None:
        """Delete the hidden state of a sequence that has ended."""
        self._runner.states.forget(row.request.key)

    def _least_s(self, rows: int, heads: int) -> float:
        return self._runner.cost(rows, heads).seconds(self._peaks)
