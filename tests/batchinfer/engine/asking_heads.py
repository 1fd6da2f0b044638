"""Heads with a layer of their own beside a tiny model, held against a reference."""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from hypothesis import event

from batchinfer.core.request import Request, common_prefixes
from batchinfer.engine.drafts.model_beside import BesideRunner, ModelBeside
from batchinfer.engine.load.layer_heads import load_layer
from batchinfer.engine.load.loaded_heads import HeadedModel
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.models.arithmetic import Arithmetic
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.heads.stored_heads import StoredLayer
from tests.batchinfer.engine.random_work import Work
from tests.batchinfer.engine.small_engine import (
    MAX_LEN,
    Limits,
    Ran,
    cpu_ops,
    drain,
    make_engine,
    make_runner,
    request,
    watcher,
)
from tests.batchinfer.engine.speculating import Drafts
from tests.batchinfer.engine.test_drafts import PEAKS


class HeadReference(Protocol):
    """The published arithmetic of a head and its model."""

    def proposed(self, tokens: Seq[int], count: int) -> list[int]:
        """Return what follows the tokens of a row."""


def with_head(model: Checkpoint, stored: StoredLayer, limits: Limits) -> tuple[ModelRunner, BesideRunner]:
    """A runner of the model, and what proposes by the head, whose K and V were never written."""
    runner = make_runner(model, cpu_ops(model), limits)
    config = SchedulerConfig(limits.seqs, limits.budget)
    arithmetic = Arithmetic(torch.float32, torch.device("cpu"), False, False, "auto")
    loaded = load_layer(stored, arithmetic)
    headed = HeadedModel(runner, model.spec, config, limits.blocks, MAX_LEN, None)
    assert loaded.weight_bytes == stored.weight_bytes(4)
    counted = 16 * stored.token_bytes(4)  # operators may round heads up
    assert counted <= loaded.block_bytes(16) < 1.3 * counted
    assert loaded.spare_bytes(4, limits.seqs) == limits.seqs * 4 * loaded.block_bytes(4)
    watched, beside = loaded.of(headed)
    own: Any = beside.runner
    for layer in own.caches:
        for values in (layer.k, layer.v):
            values.fill_(float("nan"))
    own.model._kept.values.fill_(float("nan"))
    return watched, beside


@dataclass
class Asking(Drafts):
    """Asks a head about rows, and proposes that, or what a row's answer goes on with."""

    def __init__(self, beside: BesideRunner, answers: dict[bytes, list[int]], seed: int) -> None:
        super().__init__(lambda _: [])
        self.model, self.answers, self.random = ModelBeside(beside, PEAKS), answers, random.Random(seed)
        self.found: list[tuple[Sequence, list[int], list[int]]] = []  # rows, their tokens, what was proposed

    def propose(self, rows: Seq[Sequence], ahead: int, others: int) -> Iterable[tuple[Sequence, Seq[int]]]:
        asked = [row for row in rows if self.model.takes(row) and self.random.random() < 0.7]
        asked = asked[: self.model.most_rows]
        if not asked:
            return []
        count = self.random.randint(1, 6)
        assert self.model.seconds(asked, count) > 0
        found = self.model.propose(asked, count)
        self.found += [(row, list(row.tokens), tokens) for row, tokens in zip(asked, found, strict=True)]
        return [
            (
                row,
                tokens
                if self.random.random() < 0.5
                else self.answers[row.request.key][row.output_length :][:4],
            )
            for row, tokens in zip(asked, found, strict=True)
        ]

    def ended(self, sequence: Sequence) -> None:
        self.model.ended(sequence)


def longer(number: int, row: Request) -> Request:
    """Make two of three rows plain ones with longer answers."""
    return request(number, row.prompt.tolist(), 18, ignore_eos=True) if number % 3 else row


def run(model: Checkpoint, work: Work, runner: Any, drafter: Any = None) -> Ran:
    eos = frozenset(model.spec.eos_token_ids)
    engine = make_engine(runner, work.limits, eos, stop_streams=watcher, drafter=drafter)
    return drain(engine, work.rows, arrivals=work.arrivals)


def parts_at_a_block(row: Sequence, rows: Iterable[Sequence], size: int) -> bool:
    """Whether the row's text parts from another one's exactly behind a block of prompts: there it has the K and V of
    whichever was read first."""
    texts = {other for other in rows if other.request is not row.request}
    shared = ((other, common_prefixes([_array(row), _array(other)])[0]) for other in texts)
    return any(
        n and n % size == 0 and n <= min(row.prompt_length, other.prompt_length) for other, n in shared
    )


def _array(row: Sequence) -> Any:
    return torch.tensor(row.tokens.tolist(), dtype=torch.int32).numpy()


def compare(model: Checkpoint, stored: StoredLayer, reference: HeadReference, work: Work) -> None:
    """Run rows with a head and without: the same answers, and the proposals of the reference."""
    work = replace(work, nan_every=0, rows=[longer(at, row) for at, row in enumerate(work.rows)])
    wanted = run(model, work, make_runner(model, cpu_ops(model), work.limits))
    runner, beside = with_head(model, stored, work.limits)
    answers = {key: tokens for key, (tokens, _) in wanted.answers.items()}
    drafter = Asking(beside, answers, work.seed)
    got = run(model, work, runner, drafter)
    assert got.answers == wanted.answers
    assert not drafter.model._readings, "a row that has ended is remembered"
    rows = {row for row, _, _ in drafter.found}
    plain = [one for one in drafter.found if one[0].plain_greedy]
    for row, tokens, proposed in random.Random(0).sample(plain, min(6, len(plain))):
        if parts_at_a_block(row, rows, work.limits.block_size):
            event("parts at a block")
            continue
        expected = reference.proposed(tokens, len(proposed))
        assert proposed == expected
        event("compared")
    right = sum(right for _, right in drafter.took)
    event(f"preempted: {got.total('preemptions') > 0}, right: {right > 0}")
