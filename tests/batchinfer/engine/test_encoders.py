"""Tests that an encoder's vectors equal transformers' vectors for any batch and order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModel, AutoModelForSequenceClassification

from batchinfer.core.request import Request
from batchinfer.core.sampling import Pooling, SamplingParams
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.loop.engine import Engine, EngineLimits
from batchinfer.engine.runner.micro_batches import MicroBatches
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.scheduler import Scheduler, SchedulerConfig
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.torch_ops import TorchOps
from tests.batchinfer.engine.driver import Piped
from tests.batchinfer.engine.small_engine import (
    Limits,
    drain,
    greedy,
    key_of,
    looking_ahead,
    make_runner,
)
from tests.batchinfer.engine.test_vectors import asked, vectors
from tests.encoder_checkpoints import CROSS_ENCODERS, ENCODERS, encoder_folder
from tests.examples import examples

Floats = NDArray[np.float32]
LONGEST, BLOCKS = 128, 400
LENGTHS = (1, 17, 40, 100, 2, 5, 128, 33)
EVERY = range(len(LENGTHS))
POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "last")


@cache
def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Return prompts of these lengths without the padding token."""
    rng = random.Random(3)
    return [[rng.randrange(2, 250) for _ in range(length)] for length in lengths]


@cache
def reference(family: str, lengths: tuple[int, ...]) -> list[Floats]:
    """Return the last hidden states of transformers, one prompt at a time."""
    place = encoder_folder(family)
    model = AutoModel.from_pretrained(place, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return [model(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in prompts(lengths)]


def pooled(states: Floats, pooling: Pooling) -> Floats:
    return {"cls": states[0], "last": states[-1], "mean": states.mean(0)}[pooling]


@cache
def runner_of(family: str, plain: bool = False) -> ModelRunner:
    model = inspect_checkpoint(encoder_folder(family))
    sizes = (model.spec.attention.group, model.spec.attention.head_dim)
    compiled = choose_ops(torch.device("cpu"), torch.float32, *sizes, causal=False)
    return make_runner(model, TorchOps(causal=False) if plain else compiled, Limits(blocks=BLOCKS))


def engine_of(
    runner: ModelRunner, budget: int = LONGEST, seqs: int = 64, whole_prompts: bool = True
) -> Engine:
    config = SchedulerConfig(seqs, budget, prefix_caching=False, whole_prompts=whole_prompts)
    windows = runner.layout.sizes.windows
    scheduler = Scheduler(config, BlockPool(BLOCKS, 8, len(windows)), windows=windows)
    roots = inspect_checkpoint(encoder_folder("bert")).spec.content_roots(LONGEST)
    return Engine(runner, scheduler, EngineLimits(roots, frozenset()))


@pytest.mark.parametrize("family", ENCODERS)
def test_vectors_equal_those_of_transformers(family: str) -> None:
    """Compiled operators with steps of a few prompts, and torch operators with one step."""
    ids, states = prompts(LENGTHS), reference(family, LENGTHS)
    for pooling, plain in (("cls", False), ("mean", False), ("last", True)):
        ran = drain(engine_of(runner_of(family, plain), 1000 if plain else LONGEST), asked(ids, pooling))
        assert (len(ran.steps) > 1) != plain
        assert all(request.cached_tokens == 0 for request in ran.requests.values())
        for found, wanted in zip(vectors(ran), states, strict=True):
            np.testing.assert_allclose(found, pooled(wanted, pooling), atol=1e-4, rtol=1e-4)


@given(
    family=st.sampled_from(["bert", "mpnet", "modernbert", "gemma3_text"]),
    order=st.permutations(range(len(LENGTHS))),
    budget=st.integers(LONGEST, 400),
    seqs=st.integers(1, 8),
    pooling=st.sampled_from(POOLINGS),
)
@settings(max_examples=examples(6, 300), deadline=None, print_blob=True)
def test_no_batch_changes_a_vector(
    family: str, order: list[int], budget: int, seqs: int, pooling: Pooling
) -> None:
    """Vectors are bit-identical. Prompts are never chunked, and no step exceeds the limit."""
    ids, runner = prompts(LENGTHS), runner_of(family)
    alone = [vectors(drain(engine_of(runner), asked([ids[row]], pooling)))[0] for row in order]
    ran = drain(engine_of(runner, budget, seqs), asked([ids[row] for row in order], pooling))
    for found, wanted in zip(vectors(ran), alone, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert max(step.prefill_tokens for step in ran.steps) <= budget
    assert ran.total("prefill_tokens") == sum(LENGTHS)
    assert ran.total("preemptions") == 0


@pytest.mark.parametrize("pooling", POOLINGS)
def test_with_little_memory_prompts_run_in_sequence(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: prompts are never chunked, and the step fails if a prompt does not fit."""
    runner, ids, room = looking_ahead(runner_of("modernbert")), prompts(LENGTHS), 128
    forward, ran = type(runner.model).forward, list[list[int]]()

    def scarce(model: Any, token_ids: Any, inputs: Any, *more: Any) -> Any:
        ran.append(inputs[0].query_lens)
        if len(token_ids) > room:
            raise torch.OutOfMemoryError("none left")
        return forward(model, token_ids, inputs, *more)

    wanted = vectors(drain(engine_of(runner, 400), asked(ids, pooling)))
    monkeypatch.setattr(type(runner.model), "forward", scarce)
    whole = replace(runner, micro_batches=MicroBatches(whole_chunks=True))
    for found, one in zip(vectors(drain(engine_of(whole, 400), asked(ids, pooling))), wanted, strict=True):
        np.testing.assert_array_equal(found, one)
    assert len(ran) > 3
    assert all(length in LENGTHS for lengths in ran for length in lengths)
    room = 127
    with pytest.raises(torch.OutOfMemoryError):
        drain(
            engine_of(replace(whole, micro_batches=MicroBatches(whole_chunks=True)), 400), asked(ids, pooling)
        )


@cache
def reference_logits(family: str) -> list[Floats]:
    """Return the logits of transformers, one prompt at a time.

    If the model has token types, the second half of a prompt is a second segment.
    """
    place = encoder_folder(family)
    model = AutoModelForSequenceClassification.from_pretrained(
        place, dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    for ids in prompts(LENGTHS):
        second, more = segment(family, ids), {}
        if second:
            more["token_type_ids"] = torch.tensor([[int(at >= second) for at in range(len(ids))]])
        with torch.no_grad():
            found.append(model(torch.tensor([ids]), **more).logits[0].numpy())
    return found


def segment(family: str, ids: list[int]) -> int:
    """Return the position of the second segment's first token, or 0 without token types."""
    return len(ids) // 2 if family == "cross-bert" else 0


def asked_logits(family: str, rows: Sequence[int]) -> list[Request]:
    spec = inspect_checkpoint(encoder_folder(family)).spec
    assert spec.classifier is not None
    ids = [prompts(LENGTHS)[row] for row in rows]
    each = [SamplingParams.logits(spec.classifier.pooling, segment(family, one)) for one in ids]
    made = enumerate(zip(ids, each, strict=True))
    return [Request(key_of(row), np.array(one, np.int32), params) for row, (one, params) in made]


@pytest.mark.parametrize("family", CROSS_ENCODERS)
def test_logits_equal_transformers(family: str) -> None:
    wanted = np.stack(reference_logits(family))
    assert np.ptp(wanted) > 0.1, "the inputs tell"
    for plain, budget in ((False, LONGEST), (True, 1000)):
        runner: Any = Piped(runner_of(family, plain))
        ran = drain(engine_of(runner, budget), asked_logits(family, EVERY))
        np.testing.assert_allclose(np.stack(vectors(ran)), wanted, atol=1e-4, rtol=1e-4)


@given(
    family=st.sampled_from(["cross-bert", "cross-roberta", "cross-distilbert", "cross-modernbert-mean"]),
    order=st.permutations(EVERY),
    budget=st.integers(LONGEST, 400),
    seqs=st.integers(1, 8),
)
@settings(max_examples=examples(7, 300), deadline=None, print_blob=True)
def test_no_batch_changes_a_logit(family: str, order: list[int], budget: int, seqs: int) -> None:
    """Logits are bit-identical, also next to rows with other segments, and in the order of the requests."""
    runner = runner_of(family)
    alone = [vectors(drain(engine_of(runner), asked_logits(family, [row])))[0] for row in order]
    ran = drain(engine_of(runner, budget, seqs), asked_logits(family, order))
    np.testing.assert_array_equal(np.stack(vectors(ran)), np.stack(alone))


def test_pairs_count_both_sides_of_a_window() -> None:
    """Compares with a count: a window of 11 sees 10 keys on each side."""
    cost = runner_of("modernbert").cost
    assert cost.windows == (None, 11, 11)
    near = sum(1 for i in range(40) for j in range(40) if abs(i - j) < 11)
    assert cost.pairs(40) == 40 * 40 + 2 * near
    ran = drain(engine_of(runner_of("modernbert")), asked(prompts((40,)), "mean"))
    assert ran.total("pairs") == cost.pairs(40)


def test_unsupported_options_of_encoders_are_refused() -> None:
    engine = engine_of(runner_of("bert"), budget=20)
    ran = drain(engine, asked([[5] * 21, [5] * 20], "mean"))
    errors = [ran.completions[key_of(row)].error for row in range(2)]
    assert errors[0] is not None
    assert errors[1] is None
    assert "21 tokens must run in one step, and a step has 20" in errors[0].message
    with pytest.raises(ValueError, match="an encoder only computes vectors"):
        engine.add(greedy([[5] * 3], 2))
    decoder = engine_of(runner_of("bert"), whole_prompts=False)
    with pytest.raises(ValueError, match="needs prompts that run in a single step"):
        decoder.add([Request(key_of(0), np.array([5], np.int32), SamplingParams.logits("cls"))])
    with pytest.raises(ValueError, match="whole_prompts and prefix_caching exclude each other"):
        SchedulerConfig(8, 20, prefix_caching=True, whole_prompts=True)
