"""Tests answers under constraints: masked tokens, forced tokens, complete answers and errors."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.samples import ConstraintWork
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.loop.engine import Engine
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.sequence import Sequence
from tests.batchinfer.engine.hashing_model import EOS, VOCAB, hashing_runner
from tests.batchinfer.engine.random_work import EASY
from tests.batchinfer.engine.small_engine import Ran, drain, following, make_engine, request, watcher
from tests.batchinfer.engine.word_constraints import FIRST, WordConstraints, word


def engine_for(constraints: WordConstraints, on_host: bool = False) -> Engine:
    runner = hashing_runner(ModelRunner, EASY.blocks, EASY.block_size)
    runner, masks = following(runner, constraints, on_host)
    return make_engine(runner, EASY, frozenset([EOS]), stop_streams=watcher, masks=masks)


def run(rows: Seq[Request]) -> Ran:
    return drain(engine_for(WordConstraints(EOS)), rows)


def test_forced_tokens_are_not_sampled() -> None:
    rows = [request(0, [3, 1, 4], 12, choice=("bcdef",)), request(1, [3, 1], 12, choice=("bccc", "bddd"))]
    found = run(rows)
    assert found.answers[rows[0].key] == ([ord(letter) - FIRST for letter in "bcdef"], "stop")
    assert word(found.tokens(1)) in ("bccc", "bddd")
    assert found.total("sampled_tokens") == 1, "one token of one row was left to choose"
    assert found.total("forced_tokens") == 5 + 3
    assert found.total("compile_s") == 1.0
    assert found.total("mask_s") == 0.25 * len(found.steps)


@pytest.mark.parametrize("on_host", [False, True])
def test_rows_without_a_constraint_are_recognised(on_host: bool) -> None:
    (first,) = run([request(0, [3, 1, 4], 1)]).tokens(0)
    constraints = WordConstraints(EOS, forces=False)
    steered = []
    for letter in (first, first % (VOCAB - 1) + 1):
        begun = word([letter]) + "bb"
        row = request(0, [3, 1, 4], 1, choice=(begun, begun + "c"))
        (sample,) = drain(engine_for(constraints, on_host), [row]).requests.values()
        assert sample.constrained
        steered.append(sample.steered)
    assert steered == [False, True]
    assert constraints.work.mask_s // 0.25 == (1 if on_host else 2), "on the host one of two masks was needed"


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"most": 3}, "max_tokens"),
        ({"stop_token_ids": (3,)}, "stop string"),
        ({"stop": ("x",)}, "stop string"),
    ],
)
def test_a_truncated_answer_is_an_error_that_keeps_its_tokens(params: dict[str, Any], words: str) -> None:
    row = request(0, [3, 1, 4], **{"most": 12, "choice": ("bcdefghijk",), **params})
    (answer,) = run([row]).completions.values()
    assert answer.finish_reason == "error"
    assert answer.error is not None
    assert (answer.error.code, answer.error.retryable) == ("incomplete_output", False)
    assert words in answer.error.message
    assert "bcdefghijk".startswith(word(answer.tokens.token_ids))
    assert len(answer.tokens.token_ids) > 0


def test_a_constraint_may_end_an_answer_before_min_tokens() -> None:
    row = request(0, [3, 1, 4], 12, choice=("bc", "bcd"), min_tokens=9)
    (answer,) = run([row]).completions.values()
    assert word([t for t in answer.tokens.token_ids if t != EOS]) in ("bc", "bcd")
    assert answer.finish_reason == "stop"


def test_a_constraint_that_cannot_be_compiled_fails_only_its_row() -> None:
    found = run([request(0, [1], 12, choice=("fails",)), request(1, [1], 12, choice=("bb",))])
    failed, fine = found.completions.values()
    assert failed.error is not None
    assert failed.error.code == "constraint_failed"
    assert word(fine.tokens.token_ids) == "bb"
    assert fine.error is None


def test_an_engine_without_a_tokenizer_refuses_constraints() -> None:
    engine = make_engine(hashing_runner(ModelRunner, 60, 4), EASY, frozenset([EOS]))
    with pytest.raises(ValueError, match="cannot follow a constraint"):
        engine.add([request(0, [1], 12, choice=("b",))])


def test_a_constraint_may_end_an_answer_before_its_longest() -> None:
    """Memory for its longest answer is only reserved if no other token can end it."""
    free = SamplingParams(max_tokens=9, ignore_eos=True)
    prompt = np.arange(3, dtype=np.int32)
    exact = [
        Sequence.of(Request(b"k" * 32, prompt, params), ContentRoots(64), None, 0.0).exact
        for params in (free, replace(free, choice=("yes", "no")))
    ]
    assert exact == [True, False]


def test_an_engine_counts_only_its_own_work() -> None:
    """Constraints may have worked for another engine before."""
    constraints = WordConstraints(EOS, work=ConstraintWork(compile_s=100.0, mask_s=100.0))
    ran = drain(engine_for(constraints), [request(0, [3, 1, 4], 12, choice=("bad", "cab"))])
    assert ran.total("compile_s") == 0.5
    assert 0 < ran.total("mask_s") < 100
