"""Runs draft heads with an own layer for a tiny model and compares proposals with a reference."""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from hypothesis import event

from batchinfer.core.request import Request, common_prefixes
from batchinfer.engine.drafts.draft_model import DraftModelRunner, DraftModelSource
from batchinfer.engine.drafts.medusa import MedusaSource
from batchinfer.engine.load.layer_heads import load_layer
from batchinfer.engine.load.loaded_model import AnyProposer, HeadedModel
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.draft_tree import DraftTree
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.heads.stored_heads import StoredLayer
from batchinfer.models.ops.choose import Arithmetic
from tests.batchinfer.engine.random_work import Work
from tests.batchinfer.engine.small_engine import (
    MAX_LEN,
    Limits,
    Ran,
    cpu_ops,
    drain,
    key_of,
    make_engine,
    make_runner,
    request,
    watcher,
)
from tests.batchinfer.engine.speculating import Drafts
from tests.batchinfer.engine.test_drafts import PEAKS


class HeadReference(Protocol):
    """A reference of a head and its model with the published arithmetic."""

    def proposed(self, tokens: Seq[int], count: int, allowed: Seq[int]) -> list[int]:
        """Return `count` proposed tokens after the tokens of a row, all of them in `allowed`."""


def with_head(model: Checkpoint, stored: StoredLayer, limits: Limits) -> tuple[ModelRunner, DraftModelRunner]:
    """Return a runner of the model and a runner of the head, with poisoned K and V."""
    runner = make_runner(model, cpu_ops(model), limits)
    config = SchedulerConfig(limits.seqs, limits.budget)
    arithmetic = Arithmetic(torch.float32, torch.device("cpu"), False, False, "auto")
    loaded = load_layer(stored, arithmetic)
    runner = loaded.tapped_runner(runner, MAX_LEN, limits.seqs)
    own: Any = runner.model
    own.kept.allocate(limits.blocks)
    headed = HeadedModel(runner, model.spec, config, limits.blocks, MAX_LEN, None)
    assert loaded.weight_bytes == stored.weight_bytes(4)
    counted = 16 * stored.token_bytes(4)  # operators may round heads up
    assert counted <= loaded.block_bytes(16) < 1.3 * counted
    assert loaded.spare_bytes(4, limits.seqs) == limits.seqs * 4 * loaded.block_bytes(4)
    watched, beside = loaded.of(headed)
    own = beside.runner
    for layer in own.caches:
        for values in (layer.k, layer.v):
            values.fill_(float("nan"))
    own.model._kept.values.fill_(float("nan"))
    return watched, beside


def chain_of(tree: DraftTree) -> list[int]:
    """Return the path of a draft tree that takes the most likely token at each depth."""
    kinds: Any = tree.kinds or [(0, 0)] * len(tree.tokens)
    parents, chain = tree.parents or range(-1, len(tree.tokens) - 1), [-1]
    for at, (_, rank, *_) in enumerate(kinds):
        if not rank and parents[at] == chain[-1]:
            chain.append(at)
    return [tree.tokens[at] for at in chain[1:]]


def check(tree: DraftTree, leaves: bool) -> None:
    """Check that the nodes are sorted by probability and that siblings differ.

    Args:
        leaves: if True, also check that only the most likely nodes have children.
    """
    parents = tree.parents or range(-1, len(tree.tokens) - 1)
    assert list(tree.chances) == sorted(tree.chances, reverse=True)
    assert len({*zip(parents, tree.tokens, strict=True)}) == len(tree.tokens) <= 24
    kinds: Any = tree.kinds
    for at, parent in enumerate(parents):
        assert parent < at
        assert parent < 0 or not leaves or not kinds[parent][1]


@dataclass
class Asking(Drafts):
    """Queries a head about each row and proposes its tokens, or tokens of the row's known answer."""

    def __init__(self, beside: AnyProposer, answers: dict[bytes, list[int]], seed: int) -> None:
        super().__init__(lambda _: [])
        self.model: Any = (
            DraftModelSource(beside, PEAKS)
            if isinstance(beside, DraftModelRunner)
            else MedusaSource(beside, PEAKS)
        )
        self.answers, self.random, self.left = answers, random.Random(seed), 0
        self.branches = beside.branches
        self.found: list[tuple[Sequence, list[int], list[int]]] = []  # row, its tokens, proposed tokens

    def propose(
        self, rows: Seq[Sequence], ahead: int, others: int
    ) -> Iterable[tuple[Sequence, Seq[int] | DraftTree]]:
        taken = [row for row in rows if self.model.can_draft(row)]
        self.left += sum(row.output_length > 0 for row in rows) - len([r for r in taken if r.output_length])
        asked = [row for row in taken if self.random.random() < 0.7]
        asked = asked[: self.model.most_rows]
        if not asked:
            return []
        count = self.random.randint(1, 6)
        assert self.model.seconds(asked, count) > 0
        found = self.model.propose(asked, count)
        for tree in found:
            if tree.kinds:
                check(tree, leaves=isinstance(self.model, DraftModelSource))
        self.found += [
            (row, list(row.tokens), chain_of(tree)) for row, tree in zip(asked, found, strict=True)
        ]
        return [(row, self._drafts(row, tree)) for row, tree in zip(asked, found, strict=True)]

    def _drafts(self, row: Sequence, tree: DraftTree) -> Seq[int] | DraftTree:
        """Return the head's proposal, the row's answer, or a tree with the answer after wrong tokens."""
        kind, answer = self.random.random(), self.answers[row.request.key][row.output_length :][:4]
        if kind < 0.4 or not self.branches:
            return tree if kind < 0.4 else answer
        if kind < 0.6:
            return answer
        wrong = next(token for token in range(1, 9) if token not in answer)
        tokens, parents = [wrong], [-1]
        for at, token in enumerate(answer):
            parents += [-1 if not at else 2 * at - 1, len(tokens)]
            tokens += [token, wrong]
        return DraftTree(tokens, parents)

    def finish(self, sequence: Sequence) -> None:
        self.model.finish(sequence)


FEW = (1, 2, 3, 4, 5, 7)  # of so few tokens a proposal is often right


def longer(number: int, row: Request) -> Request:
    """Make two of three rows plain greedy ones with longer answers, some with few allowed tokens."""
    if not number % 3:
        return row
    return request(
        number, row.prompt.tolist(), 18, ignore_eos=True, allowed_token_ids=FEW if number % 3 == 1 else ()
    )


def run(model: Checkpoint, work: Work, runner: Any, drafter: Any = None) -> Ran:
    eos = frozenset(model.spec.eos_token_ids)
    engine = make_engine(runner, work.limits, eos, stop_streams=watcher, drafter=drafter)
    return drain(engine, work.rows, arrivals=work.arrivals)


def parts_at_a_block(row: Sequence, rows: Iterable[Sequence], size: int) -> bool:
    """Return True if the row shares exactly a number of whole blocks with another prompt.

    The K and V of such blocks come from the prompt that was prefilled first.
    """
    texts = {other for other in rows if other.request is not row.request}
    shared = ((other, common_prefixes([_array(row), _array(other)])[0]) for other in texts)
    return any(
        n and n % size == 0 and n <= min(row.prompt_length, other.prompt_length) for other, n in shared
    )


def _array(row: Sequence) -> Any:
    return torch.tensor(row.tokens.tolist(), dtype=torch.int32).numpy()


def compare(
    model: Checkpoint, stored: StoredLayer, reference: HeadReference, work: Work, most: int = 6
) -> tuple[Ran, int]:
    """Check that a head changes no answer, and that up to `most` of its proposals equal the reference.

    Return the run with the head and the number of compared proposals.
    """
    wanted = run(model, work, make_runner(model, cpu_ops(model), work.limits))
    runner, beside = with_head(model, stored, work.limits)
    answers = {key: tokens for key, (tokens, _) in wanted.answers.items()}
    drafter = Asking(beside, answers, work.seed)
    got = run(model, work, runner, drafter)
    assert got.answers == wanted.answers
    assert not drafter.model._states, "a row that has ended is remembered"
    rows = {row for row, _, _ in drafter.found}
    plain = [
        one for one in drafter.found if one[0].plain_greedy or one[0].request.params.allowed_token_ids == FEW
    ]
    chosen = random.Random(0).sample(plain, min(most, len(plain)))
    chosen = [one for one in chosen if not parts_at_a_block(one[0], rows, work.limits.block_size)]
    for row, tokens, proposed in chosen:
        assert proposed or row.stop_token_ids, "its logits are no numbers"
        allowed = row.request.params.allowed_token_ids or range(model.spec.vocab)
        assert proposed == reference.proposed(tokens, len(proposed), list(allowed))
    return got, len(chosen)


def compare_drawn(model: Checkpoint, stored: StoredLayer, reference: HeadReference, work: Work) -> None:
    """Compare random rows; two of three of them are made plain greedy rows."""
    work = replace(work, nan_every=0, rows=[longer(*row) for row in enumerate(work.rows)])
    got, compared = compare(model, stored, reference, work)
    event(f"preempted: {got.total('preemptions') > 0}, compared: {compared > 0}")


def compare_sharing(model: Checkpoint, stored: StoredLayer, reference: HeadReference, proposals: int) -> None:
    """Compare rows that share 14 tokens, which end within a block, in sequence and in parallel."""
    shared = [at % 9 for at in range(14)]
    prompts = [[*shared[: 14 - 3 * (row == 5)], row % 4 + 3, row, 8 - row] for row in range(8)]
    rows = [longer(at + 1 + at // 2, request(0, prompt, 1)) for at, prompt in enumerate(prompts)]
    rows = [replace(one, key=key_of(at), shares_next=14) for at, one in enumerate(rows)]
    limits = Limits(budget=20, seqs=3, blocks=60, block_size=4)
    got, compared = compare(model, stored, reference, Work(limits, rows, [], (None,), 0, 1), proposals)
    assert got.total("copied_tokens") > 0
    assert compared > proposals // 2
