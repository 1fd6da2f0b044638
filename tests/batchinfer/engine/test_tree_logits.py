"""Tests that a tree's logits in one step equal the logits of each path as a separate text.

Steps after the right path find its K and V as if nothing else had run.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.draft_tree import node_path
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, Step
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.models.ops.torch_ops import TorchOps
from tests.batchinfer.engine.driver import sequence
from tests.batchinfer.engine.small_engine import Limits, checkpoint, cpu_ops, make_runner

LIMITS = Limits(blocks=60, block_size=4)


@dataclass
class Rows:
    """Runs chunks of rows with given block tables."""

    runner: ModelRunner

    def __post_init__(self) -> None:
        self.writer, self.blocks = PlanWriter(), random.Random(0).sample(range(LIMITS.blocks), LIMITS.blocks)

    def row(self, tokens: list[int]) -> Sequence:
        made = sequence(tokens, 40)
        made.tables = [[self.blocks.pop() for _ in range(12)] for _ in self.runner.layout.groups]
        return made

    def plan(self, *chunks: Chunk) -> Any:
        sampling = [chunk.sequence for chunk in chunks]
        return self.writer.of(Step(chunks=list(chunks), drafts=sum(s.drafts for s in sampling)), sampling)

    def logits(self, *chunks: Chunk) -> Tensor:
        with torch.inference_mode():
            hidden, _, _ = self.runner.forward(self.plan(*chunks))
            return self.runner.model.logits(hidden)

    def alone(self, tokens: list[int]) -> Tensor:
        """Return the logits after the last of these tokens."""
        row = self.row(tokens)
        found = self.logits(Chunk(row, 0, len(tokens)))[0]
        self.blocks += row.tables[0]
        return found


def whole(row: Sequence) -> Chunk:
    return Chunk(row, row.computed, len(row) - row.computed)


def rows_of(family: str, ops: str) -> tuple[Rows, dict[str, float]]:
    """Return rows of a family on torch or compiled operators, with a float or quantised cache, and tolerances
    of logits."""
    model = checkpoint(family)
    if ops == "codes":  # a sum in another order may make a code the next one
        model = replace(model, spec=model.spec.with_cache_dtype("int8"))
        return Rows(make_runner(model, cpu_ops(model, codes=True), LIMITS)), {"atol": 1e-3, "rtol": 1e-3}
    made = TorchOps() if ops == "torch" else cpu_ops(model)
    return Rows(make_runner(model, made, LIMITS)), {"atol": 1e-5, "rtol": 1e-5}


@pytest.mark.parametrize(
    ("family", "ops"),
    [("llama", "torch"), ("llama", "cpu"), ("llama", "codes"), ("gpt2", "cpu"), ("qwen3_moe", "cpu")],
)
def test_each_path_of_a_tree_equals_a_separate_text(family: str, ops: str) -> None:
    rows, close = rows_of(family, ops)
    model = checkpoint(family)
    assert rows.runner.follows_trees
    rng, vocab = random.Random(1), model.spec.vocab
    texts = [[rng.randrange(vocab) for _ in range(count)] for count in (9, 4, 17)]
    made = [rows.row(text[:-1]) for text in texts]
    rows.logits(*map(whole, made))
    trees = []
    for row, text, nodes in zip(made, texts, (9, 0, 14), strict=True):
        row.computed, row.tokens = len(row), row.tokens + row.tokens.__class__("i", text[-1:])
        tokens = rng.sample(range(vocab), nodes)
        row.propose(tokens, [rng.randrange(-1, at) for at in range(nodes)])
        trees.append((tokens, list(row.draft_parents)))
    found = rows.logits(*map(whole, made))
    at = 0
    for text, (tokens, parents) in zip(texts, trees, strict=True):
        for node in range(-1, len(tokens)):
            path = [tokens[one] for one in node_path(parents, node)]
            torch.testing.assert_close(found[at], rows.alone([*text, *path]), **close)
            at += 1
    assert at == len(found)


@pytest.mark.parametrize(
    ("family", "ops"), [("llama", "torch"), ("llama", "cpu"), ("llama", "codes"), ("gpt2", "cpu")]
)
def test_steps_after_a_tree_find_its_right_path(family: str, ops: str) -> None:
    rows, close = rows_of(family, ops)
    text = [5, 9, 2, 7, 1, 8, 3]
    answer = list[int]()
    for _ in range(5):
        answer.append(int(rows.alone([*text, *answer]).argmax()))
    row = rows.row(text[:-1])
    rows.logits(whole(row))
    row.computed = len(row)
    row.tokens.append(text[-1])
    others = [token for token in range(30, 60) if token not in answer]
    tokens = [others[0], answer[0], others[1], others[2], answer[1], others[3], answer[2], answer[3]]
    row.propose(tokens, [-1, -1, 0, 1, 1, 4, 4, 6])
    given = rows.runner.launch(rows.plan(whole(row))).tokens()
    assert given == [answer[:5]]
    row.drop_drafts()
    row.tokens.extend(answer)
    row.computed = len(row) - 1
    torch.testing.assert_close(rows.logits(whole(row))[0], rows.alone([*text, *answer]), **close)


def test_models_with_windows_have_no_trees() -> None:
    """An explicit request for trees raises an error."""
    model = checkpoint("mistral", sliding_window=16)
    rows = Rows(make_runner(model, cpu_ops(model), LIMITS))
    assert not rows.runner.follows_trees
    row = rows.row([4, 5, 6])
    row.propose([7, 8], [-1, -1])
    with pytest.raises(TypeError, match="do not support draft trees"):
        rows.logits(whole(row))
