"""Compares the whole engine with transformers: greedy tokens and logits in float32 for any splits and any
sharing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from batchinfer.core.request import Request
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.scheduler import Scheduler
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.ops.interface import Ops
from tests.batchinfer.engine.small_engine import (
    MAX_LEN,
    Limits,
    Noted,
    Place,
    Ran,
    RecordingSampler,
    cpu_ops,
    drain,
    greedy,
    make_engine,
    make_runner,
    request,
)
from tests.checkpoints import EOS, LONGROPE, kept_folder, make_checkpoint
from tests.examples import first_of

LENGTHS = (1, 2, 7, 16, 17, 33, 64, 65, 100, 129, 200, 300)
OUTPUT = 8

WINDOW, FULL_LAYER = "sliding_attention", "full_attention"
MIXED: dict[str, Any] = {
    "num_hidden_layers": 7,
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": [WINDOW, WINDOW, FULL_LAYER, WINDOW, WINDOW, WINDOW, FULL_LAYER],
}
VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied-sharded-llama3": ("llama", {"tied": True, "shards": 3, "rope": "llama3"}),
    "llama-biased-linear": ("llama", {"attention_bias": True, "mlp_bias": True, "rope": "linear"}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 24, "shards": 2}),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 24, "shards": 3}),
    "qwen2": ("qwen2", {"tied": True}),
    "qwen2-mixed": ("qwen2", MIXED),
    "qwen2-yarn-odd-heads": (
        "qwen2",
        {"rope": "yarn", "head_dim": 20, "num_key_value_heads": 4, "shards": 2},
    ),
    "qwen2-moe": ("qwen2_moe", {}),
    "qwen3-moe-dense-layers": (
        "qwen3_moe",
        {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3": ("qwen3", {}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "stablelm-12b": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {"num_key_value_heads": 1}),
    "phi3-window-partial": (
        "phi3",
        {"sliding_window": 24, "head_dim": 16, "rope": "partial-0.75"},
    ),
    "phi3-longrope": ("phi3", {"rope": LONGROPE, "original_max_position_embeddings": 50}),
    "gemma": ("gemma", {"hidden_act": "gelu"}),
    "gemma2": ("gemma2", {"num_hidden_layers": 3, "sliding_window": 24}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 3, "sliding_window": 24}),
    "cohere-normed": ("cohere", {"tied": True}),
    "cohere2": ("cohere2", {"num_hidden_layers": 3, "sliding_window": 24}),
    "gpt2": ("gpt2", {}),
    "gpt-neox-partial": ("gpt_neox", {"head_dim": 16, "rope": "partial-0.25"}),
    "gpt-neox-in-turn": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 3, "sliding_window": 24}),
    "deepseek-v2": ("deepseek_v2", {"q_lora_rank": None, "tied": True}),
    "deepseek-v3-yarn": ("deepseek_v3", {"rope": "yarn-mscale", "num_hidden_layers": 3}),
    "qwen3-tied-yarn": ("qwen3", {"tied": True, "rope": "yarn", "num_key_value_heads": 1}),
}
# rows of every setting below
FULL = ("llama", "mistral-window", "qwen2-mixed", "qwen3", "qwen2-moe")


SETTINGS = (
    Limits(4096, blocks=600),
    Limits(64, blocks=600),
    Limits(7, caching=False, blocks=600),
    Limits(1, blocks=600),
    Limits(4096, caching=False, blocks=600),
    Limits(64, blocks=45, scarce=True),
    Limits(512, blocks=45, caching=False, scarce=True),
)
# Few blocks for rows that keep only their windows, and chunks that fit into them
SCARCE = {
    "mistral-window": {"blocks": 14, "budget": 64},
    "mixtral-window": {"blocks": 14, "budget": 64},
    "phi3-window-partial": {"blocks": 14, "budget": 64},
    "qwen2-mixed": {"blocks": 90, "budget": 64},
    **{key: {"blocks": 75, "budget": 64} for key in ("gemma2", "gemma3", "cohere2", "gpt-oss")},
}


def prompts() -> list[list[int]]:
    """Return prompts, half of them with a shared prefix."""
    rng = random.Random(11)
    shared = [rng.randrange(250) for _ in range(300)]
    own = [[rng.randrange(250) for _ in range(n)] for n in LENGTHS]
    return own + [shared[: n // 2] + own[i][n // 2 :] for i, n in enumerate(LENGTHS)] + [shared, shared[:]]


@cache
def reference(variant: str) -> tuple[Path, list[list[int]], list[torch.Tensor]]:
    """Return the checkpoint, transformers' greedy tokens, and their logits."""
    family, options = VARIANTS[variant]
    folder = kept_folder()
    model = make_checkpoint(folder, family, seed=5, **options)
    rows = prompts()
    answers: dict[int, tuple[list[int], torch.Tensor]] = {}
    for length in {len(row) for row in rows}:  # rows of one length together: nothing is padded
        numbers = [n for n, row in enumerate(rows) if len(row) == length]
        asked = {"max_new_tokens": OUTPUT, "do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
        given = torch.tensor([rows[n] for n in numbers])
        with torch.inference_mode():
            ids = model.generate(given, attention_mask=torch.ones_like(given), **asked)
            scores = model(ids).logits[:, length - 1 : -1]
        for n, answer, row in zip(numbers, ids[:, length:].tolist(), scores, strict=True):
            end = answer.index(EOS) + 1 if EOS in answer else len(answer)
            answers[n] = answer[:end], row[:end]
    tokens, logits = zip(*(answers[n] for n in range(len(rows))), strict=True)
    return folder, list(tokens), list(logits)


def run_engine(
    folder: Path, limits: Limits, requests: list[Request], recorded: bool = True, ops: Ops | None = None
) -> tuple[Ran, dict[Place, torch.Tensor]]:
    """Run requests, count all tokens, and record the logits if asked for."""
    model = inspect_checkpoint(folder)
    eos = frozenset(model.spec.eos_token_ids)
    sampler = RecordingSampler(eos) if recorded else Sampler(eos)
    noted = Noted(replace(make_runner(model, ops or cpu_ops(model), limits), sampler=sampler))
    engine = make_engine(noted, limits, eos, model.spec.long_rope_beyond, Scheduler)
    ran = drain(engine, requests)
    if noted.layout.sizes.windows == (
        None,
    ):  # else a row that was preempted may run what it had shared before
        check_counts(ran, noted, requests)
    return ran, getattr(sampler, "seen", {})


def check_counts(ran: Ran, noted: Noted, requests: list[Request]) -> None:
    """Check the counts of steps against the tokens that ran. Work repeated after a preemption counts once."""
    requests = [request for request in requests if ran.completions[request.key].error is None]
    tokens = [token for step in noted.steps for token in step.tokens]
    once, lengths = set(tokens), {request.key: len(request.prompt) for request in requests}
    assert ran.total("recomputed_tokens") == len(tokens) - len(once)
    assert ran.total("prefill_tokens") + ran.total("decode_tokens") == len(tokens)
    assert ran.total("decode_tokens") == sum(at >= lengths[key] for key, at in once)
    assert ran.total("decode_tokens") == sum(len(ran.answers[key][0]) - 1 for key in lengths)
    prompt = ran.total("prefill_tokens") - ran.total("recomputed_tokens")
    assert prompt + ran.total("cached_tokens") == sum(lengths.values())
    assert ran.total("cached_tokens") == sum(sample.cached_tokens for sample in ran.requests.values())
    assert ran.total("sampled_tokens") == sum(len(step.sampled) for step in noted.steps)
    for step in ran.steps:
        new = step.prefill_tokens + step.decode_tokens > step.recomputed_tokens
        assert (step.flops > 0, step.bytes > 0, step.roofline_s) == (new, new, None)


def check_steps(ran: Ran, limits: Limits) -> None:
    """Check that each limit had its effect."""
    assert (ran.total("cached_tokens") > 0) == limits.caching
    assert (ran.total("preemptions") > 0) == limits.scarce
    assert max(s.prefill_tokens + s.decode_tokens for s in ran.steps) <= limits.budget
    if limits.budget in (32, 64):
        assert any(s.prefill_tokens and s.decode_tokens for s in ran.steps), "no step mixed both"


def cases() -> Iterator[Any]:
    for variant in VARIANTS:
        for number, setting in enumerate(SETTINGS):
            if variant in FULL or number in (0, 5):
                setting = replace(setting, **SCARCE.get(variant, {})) if setting.scarce else setting
                steps = setting.budget == 1 and variant != "llama"  # thousands
                slow = steps or (variant != "llama" and not setting.scarce)
                marks = [pytest.mark.slow] if slow else []
                yield pytest.param(variant, setting, id=f"{variant}-{setting}", marks=marks)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("variant", "limits"), list(cases()))
def test_tokens_and_logits_equal_transformers(variant: str, limits: Limits) -> None:
    folder, tokens, logits = reference(variant)
    ran, seen = run_engine(folder, limits, greedy(prompts(), OUTPUT))
    for row, (wanted, scores) in enumerate(zip(tokens, logits, strict=True)):
        assert ran.tokens(row) == wanted
        got = torch.stack([seen[row, at] for at in range(len(wanted))])
        torch.testing.assert_close(got, scores, atol=1e-4, rtol=1e-4)
    check_steps(ran, limits)
    assert (ran.total("recomputed_tokens") > 0) == limits.scarce
    if variant not in SCARCE:  # windows leave what could be copied behind
        assert (ran.total("copied_tokens") > 0) == limits.caching


@pytest.mark.parametrize("variant", first_of([*FULL, *(v for v in VARIANTS if v not in FULL)], 2))
def test_tokens_equal_transformers_without_recorded_logits(variant: str) -> None:
    folder, tokens, _ = reference(variant)
    ran, _ = run_engine(folder, Limits(300, blocks=600), greedy(prompts(), OUTPUT), recorded=False)
    assert [ran.tokens(row) for row in range(len(tokens))] == tokens
    assert ran.total("copied_tokens") > 0


def test_stops_lengths_and_limits() -> None:
    folder, tokens, _ = reference("llama")
    prompt, first = prompts()[5], tokens[5]
    at = next(i for i in range(1, OUTPUT) if first[i] not in first[:i])
    rows = [
        request(0, prompt, OUTPUT, stop_token_ids=(first[at],)),
        request(1, prompt, 2),
        request(2, prompt, 10_000, ignore_eos=True),
    ]
    stopped, short, long = run_engine(folder, Limits(), rows)[0].answers.values()
    assert sorted([stopped, short]) == sorted([(first[: at + 1], "stop"), (first[:2], "length")])
    assert len(long[0]) == MAX_LEN - len(prompt)  # the model's context ends it
