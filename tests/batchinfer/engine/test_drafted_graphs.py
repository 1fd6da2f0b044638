"""Tests steps that verify drafts, as a GPU replays them: answers equal those without drafts, and each step
has a graph."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

from batchinfer.core.request import Request
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.graphs import decode_graphs
from batchinfer.engine.load import build
from batchinfer.engine.load.dummy_steps import DummySteps
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.micro_batches import MicroBatches
from batchinfer.engine.tensors.batch import HostBatch
from batchinfer.input.constraints.constrained import grammar_constraints
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer_kernels.arithmetic import Device
from batchinfer_kernels.cost import Peaks
from batchinfer_kernels.gpu import attention_plan, matmul_tiles
from batchinfer_kernels.gpu.prefill_attention import prefill_attention
from tests.batchinfer.engine import guided_rows
from tests.batchinfer.engine.interpreted_gpu import stand_in
from tests.batchinfer.engine.small_engine import Ran, drain, folder, request
from tests.batchinfer.engine.speculating import Drafts, Guess, remembered
from tests.examples import first_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_hidden_layers": 1}),
    "window": ("mistral", {"sliding_window": 24, "num_hidden_layers": 1}),
    "latent": ("deepseek_v3", {}),
    "experts": ("qwen2_moe", {"num_hidden_layers": 1}),
    "windows and sinks": ("gpt_oss", {"sliding_window": 24}),
}
SHARED = 40
ANSWER = 10  # tokens
SEGMENT = 32  # keys; short rows have several segments
PEAKS = Peaks(1e12, 1e9)
GUIDED = importlib.util.find_spec("llguidance") is not None  # not on every machine with a GPU
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"repetition_penalty": 1.2, "logprobs": 2},
    {"regex": "[a-c]{2}-[xy]{3,9}"},
    {"logit_bias": ((3, 5.0),), "min_tokens": 8},
)


@pytest.fixture(autouse=True)
def _sharing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share prefixes of any length."""
    monkeypatch.setattr(attention_plan, "LEAST_SHARED_KEYS", 32)
    monkeypatch.setattr(attention_plan, "LEAST_SHARERS", 2)


@pytest.fixture(autouse=True)
def _each_kind_of_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture a kind of step at its first occurrence, instead of its third."""
    monkeypatch.setattr(decode_graphs, "CAPTURE_AT_USE", 1)


def loaded_for(monkeypatch: pytest.MonkeyPatch, path: Path, **more: Any) -> LoadedModel:
    stand_in(monkeypatch.setattr, compiles=False, quick=True)
    return loaded_on("cuda", path, **more)


def launching(monkeypatch: pytest.MonkeyPatch, parts: MicroBatches) -> tuple[LoadedModel, DeviceRunner]:
    """Load a llama whose runner launches the operators of each step separately, in these micro-batches."""
    monkeypatch.setattr(DummySteps, "warm_up", lambda _: None)
    loaded = loaded_for(monkeypatch, model_of("llama"))
    assert isinstance(loaded.runner, DeviceRunner)
    return loaded, replace(loaded.runner, graphs=None, mixed=None, micro_batches=parts)


def model_of(name: str) -> Path:
    family, options = MODELS[name]
    return folder(family, **options)


def loaded_on(device: Device, path: Path, seqs: int = 4, **more: Any) -> LoadedModel:
    config = EngineConfig(
        LoadConfig(path, "float32", device, **more), max_model_len=64, longest=62, max_num_seqs=seqs,
        max_num_batched_tokens=32, block_size=8, kv_memory=2**21, drafts=("prompt",), peaks=PEAKS, logprobs=2,
    )  # fmt: skip
    return build.load_model(
        config, constraints=grammar_constraints(guided_rows.tokenizer()) if GUIDED else None
    )


def rows_of(
    prompts: Iterable[list[int]], asked: Iterable[dict[str, Any]] = ASKED, most: int = ANSWER
) -> list[Request]:
    """Return rows with the options of `asked` in turns."""
    kinds = [one for one in asked if GUIDED or "regex" not in one]
    return [request(row, prompt, most, **kinds[row % len(kinds)]) for row, prompt in enumerate(prompts)]


def work(most: int = ANSWER) -> list[Request]:
    """Return a row of each kind and one more; every second prompt has the common prefix."""
    rng = random.Random(3)
    shared = [rng.randrange(250) for _ in range(SHARED)]
    prompts = [[*shared, rng.randrange(250)] if row % 2 else shared[: 3 + row] for row in range(6)]
    return rows_of(prompts, most=most)


def drawn_work() -> list[Request]:
    """Return the rows of `work`, with sampled instead of greedy tokens."""
    return [
        replace(row, params=replace(row.params, temperature=1.1, seed=at)) for at, row in enumerate(work())
    ]


class InParts(MicroBatches):
    """Splits every step without notifying the scheduler, which would make smaller steps."""

    def split(self, step: HostBatch) -> list[HostBatch]:
        return MicroBatches(3).split(step)


@cache
def on_a_cpu(model: str, rows: Callable[[], list[Request]] = work) -> Ran:
    """Return a run of the rows without drafts on CPU operators, a hundred times as fast as the interpreter.

    Call it before `stand_in` replaces the device.
    """
    return drain(loaded_on("cpu", model_of(model)).engine(), rows())


def verified(
    loaded: LoadedModel, guess: Guess, rows: list[Request], holds: float = 0.0, **how: Any
) -> tuple[Ran, int, int]:
    """Run rows with drafts; return the run, the number of drafts and the number of right ones."""
    drafts = Drafts(guess, holds=holds)
    ran = drain(loaded.engine(drafter=drafts, **how), rows)
    drafted, accepted = (sum(column) for column in zip(*drafts.took, strict=True))
    return ran, drafted, accepted


def noted_queries(monkeypatch: pytest.MonkeyPatch, kind: Callable[..., bool] = lambda *_: True) -> list[int]:
    """Return a list that receives the maximum queries per row of each graph plan, for steps of this kind."""
    seen, plan = list[int](), TritonOps.plan_captured

    def noted(*arguments: Any, queries: int, **more: Any) -> Any:
        seen.extend([queries] * kind(*arguments))
        return plan(*arguments, queries=queries, **more)

    monkeypatch.setattr(TritonOps, "plan_captured", noted)
    return seen


@pytest.mark.parametrize(
    ("model", "right"), first_of([(model, right) for right in (0.8, 0.0) for model in MODELS], 1)
)
def test_drafts_change_no_answer(monkeypatch: pytest.MonkeyPatch, model: str, right: float) -> None:
    wanted, loaded = on_a_cpu(model), loaded_for(monkeypatch, model_of(model))
    assert isinstance(loaded.runner, DeviceRunner)
    graphs = loaded.runner.graphs
    assert graphs is not None
    assert graphs.steps.drafted == 32, "as many tokens as a step may have"
    before, seen = graphs.captured, noted_queries(monkeypatch)
    got, drafted, accepted = verified(loaded, remembered(wanted, right, 4, most=7), work())
    assert got.answers == wanted.answers
    assert got.logprobs.keys() == wanted.logprobs.keys()
    assert "eager" not in {step.launch for step in got.steps}
    assert sum(step.launch == "full_graph" for step in got.steps) > 2
    assert {2, 4, 8} <= {*seen}
    assert graphs.captured > before
    assert drafted > 20
    assert (accepted > drafted / 2) == (right > 0)
    assert len(got.steps) < len(wanted.steps) or not right


def test_drafts_change_no_bit_of_deterministic_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("attention_plan", "attention_splits", "part_room"):
        monkeypatch.setattr(f"batchinfer_kernels.gpu.{module}.SEGMENT", SEGMENT)
    segmented = partial(prefill_attention, segment=SEGMENT)
    monkeypatch.setattr("batchinfer_kernels.gpu.paged_attention.prefill_attention", segmented)
    monkeypatch.setattr(matmul_tiles, "LEAST_SEGMENT", 16)
    loaded = loaded_for(monkeypatch, model_of("llama"), seqs=2, deterministic=True)
    rows = work(4)[1:3]
    wanted = drain(loaded.engine(), rows)
    got, _, accepted = verified(loaded, remembered(wanted, 0.7, 4, most=7), rows)
    assert got.answers == wanted.answers
    assert got.logprobs == wanted.logprobs
    assert accepted > 1


@pytest.mark.slow
@pytest.mark.parametrize("parts", [InParts, MicroBatches])
def test_rows_with_drafts_draw_equal_tokens_in_eager_steps(
    monkeypatch: pytest.MonkeyPatch, parts: type[MicroBatches]
) -> None:
    """Micro-batches that split a row's drafts are included."""
    wanted = on_a_cpu("llama", drawn_work)
    loaded, runner = launching(monkeypatch, parts())
    guess = remembered(wanted, 0.8, seed=1, most=7)
    got, drafted, accepted = verified(loaded, guess, drawn_work(), runner=runner)
    assert got.answers == wanted.answers
    assert {step.launch for step in got.steps} == {"eager"}
    assert drafted / 2 < accepted < drafted
    assert got.logprobs.keys() == wanted.logprobs.keys()
