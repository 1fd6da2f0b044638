"""Tests that a row with an adapter has the answers of a model with the merged adapter, in batches with other
adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.graphs import decode_graphs
from batchinfer.engine.runner.micro_batches import MicroBatches
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.models.adapters.stored_adapter import StoredAdapter, inspect_adapter
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.ops.cpu_ops import CpuOps
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer_kernels.arithmetic import Quantization
from tests.batchinfer.engine.driver import Preempting
from tests.batchinfer.engine.interpreted_gpu import DEVICE, triton_ops
from tests.batchinfer.engine.small_engine import (
    TRITON,
    Limits,
    Ran,
    checkpoint,
    cpu_ops,
    drain,
    folder,
    key_of,
    looking_ahead,
    make_engine,
    make_runner,
    quantized,
)
from tests.batchinfer.engine.test_scores import SHAPES, Row, asked, check, drawn, scored
from tests.checkpoints import kept_folder
from tests.examples import examples, first_of
from tests.lora_adapters import make_adapter, merged

# Masked lanes are computed too, by NumPy
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
NAMES = ("", "one", "two", "three")
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Modules that an adapter changes per family: own modules, several products in one, transposed weights
MODULES = {
    "llama": LLAMA,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": ("query_key_value", "dense", "dense_h_to_4h"),
    "gemma2": LLAMA,
    "deepseek_v2": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "shared_experts.down_proj"),
    "mixtral": ("q_proj", "v_proj"),
}


@cache
def base(family: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder(family), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@cache
def adapters(family: str) -> dict[str, StoredAdapter]:
    """Return three adapters: all modules; rsLoRA with different ranks; one module with its own alpha."""
    ends, made = MODULES[family], kept_folder()
    every = make_adapter(made / "one", base(family), ends, seed=1)
    some = make_adapter(
        made / "two", base(family), ends[1:], rank=3, ranks={ends[-1]: 17}, use_rslora=True, seed=2
    )
    single = make_adapter(made / "three", base(family), ends[:1], alpha_pattern={ends[0]: 3.0}, seed=3)
    places = {"one": every, "two": some, "three": single}
    return {name: inspect_adapter(name, path, checkpoint(family)) for name, path in places.items()}


@cache
def reference(family: str, name: str, row: Row) -> tuple[Any, Any]:
    """Return transformers' log-probabilities of each continuation with the merged model."""
    return scored(merged(base(family), adapters(family)[name].path) if name else base(family), row)


def with_adapters(requests: Sequence[Request], names: Sequence[str]) -> list[Request]:
    return [
        replace(request, params=replace(request.params, adapter=name))
        for request, name in zip(requests, names, strict=True)
    ]


def runner_of(
    family: str, ops: Ops, limits: Limits, device: str = "cpu", places: int | None = None
) -> ModelRunner:
    return make_runner(checkpoint(family), ops, limits, device, adapters(family), places)


def run(runner: Any, limits: Limits, requests: list[Request], **more: Any) -> Ran:
    return drain(make_engine(runner, limits, frozenset(), **more), requests)


@pytest.mark.sample(7)
@pytest.mark.parametrize("kind", ["cpu", "torch"])
@pytest.mark.parametrize("family", MODULES)
def test_scores_equal_the_merged_models(family: str, kind: str) -> None:
    rows, limits = drawn(1, SHAPES), Limits(budget=24)
    names = [NAMES[at % 4] for at in range(len(rows))]
    ops = cpu_ops(checkpoint(family)) if kind == "cpu" else TorchOps()
    ran = run(runner_of(family, ops, limits), limits, with_adapters(asked(rows), names))
    check(ran, [reference(family, name, row) for name, row in zip(names, rows, strict=True)], atol=2e-4)


@TRITON
@pytest.mark.parametrize("places", first_of([2, None], 1))
def test_triton_s_operators_score_as_the_merged_models(places: int | None) -> None:
    """Two of three adapters fit on the device at a time."""
    rows, limits = drawn(2, ((9, (3, 2)), (9, (4,)), (20, (2,)), (3, (1, 1)))), Limits(budget=24)
    ops = triton_ops(checkpoint("llama"))
    runner = runner_of("llama", ops, limits, DEVICE, places)
    ran = run(runner, limits, with_adapters(asked(rows), NAMES))
    assert runner.state.adapters.moved == (0 if places is None else 3)
    check(ran, [reference("llama", name, row) for name, row in zip(NAMES, rows, strict=True)], atol=2e-4)


PREFIX = [11, 5, 203, 7, 7, 90, 41, 8, 17, 3, 250, 66, 1, 2, 3, 4, 5, 6, 7, 8]


def generating(names: Sequence[str], shared: Sequence[int], most: int = 9) -> list[Request]:
    """Return requests whose prompts begin alike, one per adapter name.

    Args:
        names: adapter of each row, "" for none.
        shared: number of shared tokens of each row.
        most: maximum number of output tokens.
    """
    found = []
    for row, (name, length) in enumerate(zip(names, shared, strict=True)):
        prompt = np.array([*PREFIX[:length], row * 3 % 200, row % 7], np.int32)
        params = SamplingParams(max_tokens=most, ignore_eos=True, adapter=name, logprobs=0)
        found.append(Request(key_of(row), prompt, params))
    return found


@cache
def alone(quantization: Quantization, name: str, row: int, length: int, count: int) -> tuple[list[int], Any]:
    """Return the tokens and log-probabilities of a row that runs alone."""
    limits = Limits(caching=False)
    requests = generating(["" if at != row else name for at in range(count)], [length] * count)
    ran = run(llama(quantization, limits), limits, [requests[row]])
    logprobs = ran.logprobs[key_of(row)]
    assert logprobs is not None
    return ran.tokens(row), logprobs[0]


def llama(quantization: Quantization, limits: Limits, places: int | None = None) -> ModelRunner:
    model: Checkpoint = quantized(checkpoint("llama"), quantization)
    ops = cpu_ops(model)
    assert isinstance(ops, CpuOps), "CPU operators are bit-exact for any batch"
    return make_runner(model, ops, limits, adapters=adapters("llama"), places=places)


@settings(max_examples=examples(4, 300), deadline=None)
@given(
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=9),
    shared=st.sampled_from([0, 8, 17, 20]),
    budget=st.integers(4, 40),
    seqs=st.integers(1, 9),
    scarce=st.booleans(),
    caching=st.booleans(),
    ahead=st.booleans(),
    quantization=st.sampled_from(["none", "int8", "int4"]),
    places=st.sampled_from([None, 1, 2]),
)
def test_a_row_in_a_batch_has_the_answer_of_a_run_alone(
    names: list[str],
    shared: int,
    budget: int,
    seqs: int,
    scarce: bool,
    caching: bool,
    ahead: bool,
    quantization: Quantization,
    places: int | None,
) -> None:
    """Batches, cached prefixes, preemptions, micro-batches and adapters that share a slot change nothing."""
    blocks = max(12, 4 * min(seqs, len(names))) if scarce else 200
    limits = Limits(budget, seqs, caching, blocks, scarce=scarce)
    runner: Any = llama(quantization, limits, places)
    if ahead:
        runner = replace(looking_ahead(runner), micro_batches=MicroBatches(7))
    requests = generating(names, [shared] * len(names))
    ran = run(runner, limits, requests, kind=Preempting if scarce else None)
    for row, name in enumerate(names):
        tokens, logprobs = alone(quantization, name, row, shared, len(names))
        assert ran.tokens(row) == tokens
        found = ran.logprobs[key_of(row)]
        assert found is not None
        np.testing.assert_allclose(found[0], logprobs, atol=1e-6)


def test_rows_share_prefixes_only_with_rows_of_their_adapter() -> None:
    limits = Limits(seqs=1)
    ran = run(llama("none", limits), limits, generating(["", "one", "", "one", "two"], [20] * 5))
    cached = [ran.requests[key_of(row)].cached_tokens for row in range(5)]
    assert cached == [0, 0, 20, 20, 0]
    different = [tuple(ran.tokens(row)) for row in (0, 1, 4)]
    assert len(set(different)) == 3


@TRITON
def test_decode_steps_with_any_adapters_replay_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.batchinfer.engine.test_triton_engine import gpus_config, loaded_as_a_job_does

    monkeypatch.setattr(decode_graphs, "CAPTURE_AT_USE", 1)
    config = gpus_config("none", deterministic=False)
    places = tuple((name, adapter.path) for name, adapter in one_layer().items())
    config = replace(config, load=replace(config.load, adapters=places))
    loaded = loaded_as_a_job_does(monkeypatch, config)
    names = ("one", "", "three", "two")
    requests = generating(names, [0, 8, 17, 20], most=3)
    rows = [replace(r, params=replace(r.params, logprobs=None)) for r in requests]
    found = drain(loaded.engine(), rows)
    others, plain = (
        drain(loaded.engine(), [replace(r, params=replace(r.params, adapter=name)) for r in rows[:2]])
        for name in ("two", "")
    )
    limits, model = Limits(), checkpoint("llama", num_hidden_layers=1)
    wanted = make_runner(model, cpu_ops(model), limits, adapters=one_layer())
    assert found.answers == run(wanted, limits, rows).answers
    assert {step.launch for step in found.steps} == {"eager", "full_graph"}
    assert found.answers != others.answers
    assert {step.launch for step in others.steps} == {"eager", "full_graph"}
    assert "eager" not in {step.launch for step in plain.steps}, "rows without adapters keep their graphs"


@pytest.mark.parametrize("kind", first_of(["cpu", "torch"], 1))
def test_adapters_take_turns_in_their_places(kind: str) -> None:
    """Rows of one adapter run consecutively, which moves each adapter once. A step has at most `places`
    adapters."""
    limits, names = Limits(seqs=4), ("one", "one", "", "two", "two", "two", "three", "", "three", "one")
    ops = cpu_ops(checkpoint("llama")) if kind == "cpu" else TorchOps()
    requests = generating(names, [8] * len(names))
    wanted = run(runner_of("llama", ops, limits), limits, requests)
    for places, moves in ((1, 4), (2, 4), (3, 3)):
        runner = runner_of("llama", ops, limits, places=places)
        ran = run(runner, limits, requests)
        assert runner.state.adapters.moved == moves
        assert ran.answers == wanted.answers


@cache
def one_layer() -> dict[str, StoredAdapter]:
    source, made = folder("llama", num_hidden_layers=1), kept_folder()
    model = AutoModelForCausalLM.from_pretrained(source)
    places = {name: make_adapter(made / name, model, LLAMA, seed=at) for at, name in enumerate(NAMES[1:])}
    whole = checkpoint("llama", num_hidden_layers=1)
    return {name: inspect_adapter(name, path, whole) for name, path in places.items()}
