"""Tests draft trees on a GPU: steps that verify them run as graphs, in pieces and eagerly.

Accepted nodes are moved after the text before the host knows them. Answers are those without drafts.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.micro_batches import MicroBatches
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from tests.batchinfer.engine.interpreted_gpu import DEVICE, triton_ops
from tests.batchinfer.engine.small_engine import Limits, checkpoint, drain, make_runner
from tests.batchinfer.engine.speculating import branching
from tests.batchinfer.engine.test_drafted_graphs import (
    InParts,
    launching,
    loaded_for,
    model_of,
    noted_queries,
    on_a_cpu,
    verified,
    work,
)
from tests.batchinfer.engine.test_drafted_graphs import (
    _each_kind_of_step_is_captured as _each_kind_of_step_is_captured,
)
from tests.batchinfer.engine.test_drafted_graphs import _sharing_pays as _sharing_pays
from tests.examples import first_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy


@pytest.mark.sample(1)
@pytest.mark.parametrize("cache", ["auto", "int8", "fp8"])
def test_answers_do_not_depend_on_trees(monkeypatch: pytest.MonkeyPatch, cache: Any) -> None:
    """Sampled rows with penalties, biases and masks, prompts and chains, padded graphs and shared prefixes. K
    and V are moved with their scales: a wrong node would change later tokens."""
    plain = on_a_cpu("llama")
    loaded = loaded_for(monkeypatch, model_of("llama"), kv_cache=cache, deterministic=cache != "auto")
    assert isinstance(loaded.runner, DeviceRunner)
    assert loaded.runner.follows_trees
    wanted = plain if cache == "auto" else drain(loaded.engine(), work())
    of_trees = noted_queries(monkeypatch, lambda _, inputs, *__: inputs.tree is not None)
    got, drafted, accepted = verified(loaded, branching(wanted, 0.8, 1, most=7), work(), holds=0.3)
    assert got.answers == wanted.answers
    assert got.logprobs.keys() == wanted.logprobs.keys()
    assert "eager" not in {step.launch for step in got.steps}
    assert {4, 8} <= {*of_trees}
    assert 10 < accepted < drafted
    assert len(got.steps) < len(wanted.steps)


@pytest.mark.parametrize("parts", first_of([InParts, MicroBatches], 1))
def test_trees_are_verified_in_eager_steps(
    monkeypatch: pytest.MonkeyPatch, parts: type[MicroBatches]
) -> None:
    """Micro-batches that split a tree's nodes are included."""
    wanted = on_a_cpu("llama")
    loaded, runner = launching(monkeypatch, parts())
    guess = branching(wanted, 0.8, 1, most=7)
    got, drafted, accepted = verified(loaded, guess, work()[:5], holds=0.3, runner=runner)
    assert got.answers.items() <= wanted.answers.items()
    assert {step.launch for step in got.steps} == {"eager"}
    assert drafted / 4 < accepted < drafted


def test_models_with_windows_or_latents_have_chains() -> None:
    window = checkpoint("mistral", sliding_window=24)
    assert not make_runner(window, triton_ops(window), Limits(), DEVICE).follows_trees
    shape = AttentionShape(torch.float32, 4, 1, 24)
    assert [TritonOps(replace(shape, latent=latent)).follows_trees for latent in (False, True)] == [
        True,
        False,
    ]
