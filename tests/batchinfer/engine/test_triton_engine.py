"""The whole engine with Triton's operators, on the GPU if there is one, else in the interpreter, against the CPU's."""

from __future__ import annotations

import importlib.util
import random

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch
import triton

from batchinfer.engine import build
from batchinfer.engine.config import EngineConfig
from batchinfer.engine.device_runner import DeviceRunner
from batchinfer.ops.interface import Ops, Quantization
from batchinfer.ops.triton_ops import TritonOps
from batchinfer_kernels.gpu import attention_plan
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from tests.batchinfer.engine.hashing_model import captured_eagerly
from tests.batchinfer.engine.small_engine import (
    MAX_LEN,
    Limits,
    Ran,
    checkpoint,
    cpu_ops,
    drain,
    folder,
    greedy,
    make_engine,
    make_runner,
)

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy

VARIANTS = {
    "llama": ("llama", {}),
    "llama-window": ("mistral", {"sliding_window": 24}),
    "qwen2-biased": ("qwen2", {"tied": True}),
    "qwen3-normed": ("qwen3", {"rope": "yarn", "num_key_value_heads": 1}),
}
SHARED = 40
OUTPUT = 5
SETTINGS = {
    "chunked": Limits(budget=32),
    "whole": Limits(budget=4096, caching=False),
    "preempted": Limits(budget=64, blocks=19, scarce=True),
}


def prompts() -> list[list[int]]:
    """Short and long ones, of which four begin alike."""
    rng = random.Random(11)
    shared = [rng.randrange(250) for _ in range(SHARED)]
    own = [[rng.randrange(250) for _ in range(n)] for n in (1, 7, 17, 33)]
    return own + [shared + row[:7] for row in own]


def triton_ops(variant: str, quantization: Quantization = "none", deterministic: bool = False) -> Ops:
    family, options = VARIANTS[variant]
    config = checkpoint(family, **options).config
    sizes = (config.q_heads, config.kv_heads, config.head_dim)
    return TritonOps(AttentionShape(torch.float32, *sizes, deterministic), quantization)


def ran(variant: str, limits: Limits, ops: Ops, device: str) -> Ran:
    family, options = VARIANTS[variant]
    model = checkpoint(family, **options)
    engine = make_engine(
        make_runner(model, ops, limits, device), limits, frozenset(model.config.eos_token_ids)
    )
    return drain(engine, greedy(prompts(), OUTPUT))


def on_the_cpu(variant: str, limits: Limits, quantization: Quantization = "none") -> Ran:
    family, options = VARIANTS[variant]
    return ran(variant, limits, cpu_ops(checkpoint(family, **options), quantization), "cpu")


def cases():
    for variant in VARIANTS:
        for setting in SETTINGS:
            slow = variant != "llama" and setting != "chunked"
            yield pytest.param(variant, setting, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("variant", "setting"), list(cases()))
def test_tokens_equal_those_of_the_cpu(monkeypatch, variant, setting):
    limits = SETTINGS[setting]
    wanted = on_the_cpu(variant, limits)
    levels = []
    find = attention_plan.find_shared

    def watched(*arguments):
        levels.append(find(*arguments))
        return levels[-1]

    # so little is shared here that it would not be worth it
    monkeypatch.setattr(attention_plan, "LEAST_SHARED_KEYS", 32)
    monkeypatch.setattr(attention_plan, "LEAST_SHARERS", 2)
    monkeypatch.setattr(attention_plan, "find_shared", watched)
    got = ran(variant, limits, triton_ops(variant), DEVICE)
    assert got.answers == wanted.answers
    assert len({tuple(tokens) for tokens, _ in got.answers.values()}) == len(prompts())
    assert any(levels) == limits.caching, "rows that begin alike are to be attended together"
    assert (sum(s.preemptions for s in got.steps) > 0) == limits.scarce
    if limits.budget == 32:
        assert any(s.prefill_tokens and s.decode_tokens for s in got.steps), (
            "no step mixed prefill and decode"
        )


@pytest.mark.parametrize(("quantization", "deterministic"), [("int8", False), ("none", True)])
def test_other_arithmetic(quantization, deterministic):
    limits = SETTINGS["chunked"]
    wanted = on_the_cpu("llama", limits, quantization)
    got = ran("llama", limits, triton_ops("llama", quantization, deterministic), DEVICE)
    assert got.answers == wanted.answers


class NoMeter:
    """The interpreter takes the host's memory."""

    def restart(self) -> None:
        """Nothing is counted."""

    def peak(self) -> int:
        return 0


def test_all_of_the_gpus_path(monkeypatch):
    """As a job's engine is built: dummy steps, a scratch block, padded and captured decode steps, looking ahead."""
    monkeypatch.setattr(attention_plan, "LEAST_SHARED_KEYS", 32)
    monkeypatch.setattr(attention_plan, "LEAST_SHARERS", 2)
    if DEVICE == "cpu":
        monkeypatch.setattr(build, "choose_ops", lambda *_: triton_ops("llama"))
        monkeypatch.setattr(build, "GpuMeter", lambda _: NoMeter())
        monkeypatch.setattr(build, "capture_on_gpu", lambda: captured_eagerly)
    loaded = build.load_model(
        EngineConfig(
            model=folder("llama"),
            dtype="float32",
            device=DEVICE,
            max_model_len=MAX_LEN,
            longest=60,
            max_num_seqs=5,
            max_num_batched_tokens=32,
            block_size=8,
            kv_memory=2**19,
        )
    )
    assert (loaded.info.ops, loaded.info.blocks) == ("triton", 51), (
        "five rows of 60 tokens, and a quarter more"
    )
    runner = loaded.runner
    assert isinstance(runner, DeviceRunner)
    assert runner.graphs is not None
    before = runner.graphs.captured
    assert before == len(runner.graphs.sizes) + 1 == 5, "all sizes, and the largest with shared keys"
    got = drain(loaded.engine(), greedy(prompts(), OUTPUT))
    assert got.answers == on_the_cpu("llama", SETTINGS["chunked"]).answers
    assert runner.graphs.captured > before, "steps whose rows share keys need graphs of their own"
