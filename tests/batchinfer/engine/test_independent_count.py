"""FLOPs and bytes of a run equal what is counted without our costs: over transformers' eager model of the same
checkpoint, fed the same rows.

FLOPs: torch's counter over what transformers computes, less the (query, key) pairs that a causal mask hides. Bytes: the
tensors that pass transformers' modules, and its parameters, each operand of an operator once; weights once a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DynamicCache

from batchinfer.core.request import Request
from batchinfer.machine.hardware import Hardware
from batchinfer.report.tables.details import Machine
from batchinfer.report.tables.meter import Meter
from batchinfer.report.tables.tables import run_row
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.engine.small_engine import (
    Limits,
    Noted,
    NotedStep,
    Ran,
    checkpoint,
    cpu_ops,
    drain,
    folder,
    greedy,
    make_engine,
    make_runner,
)
from tests.kernels.gpu.pairs import each_first

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
OUTPUT = 12
PEAKS = Peaks(1e10, 1e10)
LIMITS = Limits(budget=96, blocks=400)
FLOAT = 4


def rows(shared: bool) -> list[Request]:
    """Prompts of many lengths; two thirds begin alike, or none does."""
    rng = Random(3)
    beginning = [rng.randrange(250) for _ in range(45)]
    own = [[rng.randrange(250) for _ in range(rng.randrange(4, 60))] for _ in range(15)]
    prompts = [beginning + p if shared and i % 3 else p for i, p in enumerate(own)]
    return greedy(prompts, OUTPUT, ignore_eos=True)


def run(family: str, requests: list[Request]) -> tuple[Ran, Noted]:
    model = checkpoint(family, **SIZES)
    noted = Noted(make_runner(model, cpu_ops(model), LIMITS))
    return drain(make_engine(noted, LIMITS, frozenset(), peaks=PEAKS), requests), noted


def reported(ran: Ran, folder: Path) -> dict[str, Any]:
    """What the run table says of the steps."""
    with Meter(folder, "r", Machine(None, PEAKS)) as meter:
        for step in ran.steps:
            meter.step(step)
        measured = meter.finish()
    now = datetime.now(UTC)
    machine = Hardware("a CPU", "cpu", 1, None, {"float32": PEAKS.flops_per_s}, PEAKS.bytes_per_s, "measured")
    facts = {"run_id": "r", "job": "job", "output": "/d/res", "started_at": now, "finished_at": now}
    return run_row(facts | {"dtype": "float32"}, machine, measured)


def eager(family: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(
        folder(family, **SIZES),
        attn_implementation="eager",
        experts_implementation="eager",  # the counter does not know the grouped product
        dtype=torch.float32,
    )
    return model.eval()


def counted_flops(model: Any, prompt: list[int], answer: list[int], cached: int) -> int:
    """Of one row, of whose prompt the cache holds so many tokens, teacher-forced: every position but the last one's."""
    config = model.config
    heads, size = config.num_attention_heads, config.head_dim
    tokens = torch.tensor([prompt + answer[:-1]])
    past = DynamicCache(config=config)
    with torch.no_grad():
        if cached:
            model(tokens[:, :cached], past_key_values=past, logits_to_keep=1)
        with FlopCounterMode(display=False) as counter:
            model(tokens[:, cached:], past_key_values=past, logits_to_keep=len(answer))
    queries, keys = tokens.shape[1] - cached, tokens.shape[1]
    seen = sum(at + 1 for at in range(cached, keys))
    masked = queries * keys - seen
    return counter.get_total_flops() - 4 * config.num_hidden_layers * heads * size * masked


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "shared"), each_first(("llama", "qwen3_moe", "qwen2", "qwen3"), (False, True))
)
def test_flops_are_those_that_torch_counts(family: str, shared: bool, tmp_path: Path) -> None:
    requests, model = rows(shared), eager(family)
    ran, _ = run(family, requests)
    expected = sum(
        counted_flops(
            model,
            request.prompt.tolist(),
            ran.answers[request.key][0],
            ran.requests[request.key].cached_tokens,
        )
        for request in requests
    )
    assert any(sample.cached_tokens for sample in ran.requests.values()) == shared
    row = reported(ran, tmp_path)
    assert row["flops"] == pytest.approx(expected, rel=0.01)
    assert row["mfu"] == pytest.approx(expected / (row["engine_wall_s"] * PEAKS.flops_per_s), rel=0.01)


@dataclass
class Passed:
    """Bytes that pass a model's modules in one forward."""

    token: float = 0.0  # in what every token passes
    sampled: float = 0.0  # in the head and what is before it
    weights: float = 0.0  # of what every token passes
    head_weights: float = 0.0


# How often each module's operand and its result pass: q, k and v are stored or turned, and attention reads q and writes
# as much; norms read x and the residual and write both; what the activation wrote is read
PASSES = {
    "embed_tokens": (0, 2),
    "input_layernorm": (0, 4),
    "post_attention_layernorm": (0, 4),
    "q_proj": (1, 5),
    "k_proj": (0, 3),
    "v_proj": (0, 3),
    "o_proj": (1, 1),
    "gate_proj": (1, 2),
    "up_proj": (0, 2),
    "down_proj": (2, 1),
}


def _note(passed: Passed, name: str, module: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Count each operand of the operators that a step has: what one writes and another reads counts in both."""
    last, given = name.rpartition(".")[2], inputs[0] if inputs else output
    weights = sum(p.nbytes for p in module.parameters())
    if last in PASSES:
        operand, result = PASSES[last]
        passed.token += operand * given.nbytes + result * output.nbytes
        passed.weights += weights if last != "embed_tokens" else 0
    elif last == "lm_head":  # the sampler reads the logits, and writes a token
        passed.sampled += given.nbytes + 2 * output.nbytes + 8 * output.shape[1]
        passed.head_weights += weights
    elif name == "model.norm":  # adds the residual, of the rows that are sampled
        passed.sampled += 4 * output.nbytes / output.shape[1]
        passed.head_weights += weights


def counted_bytes(model: Any, noted: Noted, requests: list[Request]) -> float:
    prompts = {request.key: request.prompt.tolist() for request in requests}
    passed, tokens, config = Passed(), 16, model.config
    leaves = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    hooks = [module.register_forward_hook(partial(_note, passed, name)) for name, module in leaves]
    with torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.long), logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    turned = config.num_hidden_layers * (4 * config.head_dim + 8)  # cos and sin, and where to store
    kept = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * FLOAT
    total = 0.0
    for step in noted.steps:
        sampled = len(step.sampled)
        total += passed.weights + (passed.head_weights if sampled else 0)
        total += len(step.tokens) * (passed.token / tokens + turned)
        total += sampled * passed.sampled + kept * _distinct(step, prompts)
    return total


def _distinct(step: NotedStep, prompts: dict[bytes, list[int]]) -> int:
    """Count the cached tokens that a step reads: whole blocks of a prompt that several rows begin with once."""
    size, blocks, others = LIMITS.block_size, set(), 0
    for key, _, end in step.spans:
        prompt = prompts[key]
        whole = min(end, len(prompt)) // size
        blocks |= {tuple(prompt[: (at + 1) * size]) for at in range(whole)}
        others += end - whole * size
    return len(blocks) * size + others


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_bytes_are_those_of_the_tensors(family: str, shared: bool, tmp_path: Path) -> None:
    requests = rows(shared)
    ran, noted = run(family, requests)
    expected = counted_bytes(eager(family), noted, requests)
    row = reported(ran, tmp_path)
    assert row["bytes_moved"] == pytest.approx(expected, rel=0.01)
    assert row["mbu"] == pytest.approx(expected / (row["engine_wall_s"] * PEAKS.bytes_per_s), rel=0.01)
