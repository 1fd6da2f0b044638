"""The whole engine against transformers: greedy tokens and logits in float32, however the work is cut and shared."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchinfer.core.request import Completion, Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.kv.cache_layout import cache_layout
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.loop.engine import Engine, EngineLimits
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampled import DeviceTokens, Sampled
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.scheduler import Scheduler, SchedulerConfig
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.cache_tensors import allocate_caches
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.interface import LayerCache, Ops
from batchinfer.models.spec.model_cost import model_cost
from tests.batchinfer.engine.driver import Hopeful
from tests.batchinfer.models.paged import load_decoder
from tests.checkpoints import EOS, LONGROPE, kept_folder, make_checkpoint
from tests.examples import first_of

LENGTHS = (1, 2, 7, 16, 17, 33, 64, 65, 100, 129, 200, 300)
OUTPUT = 8
MAX_LEN = 320

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
# these run under every setting below
FULL = ("llama", "mistral-window", "qwen2-mixed", "qwen3", "qwen2-moe")


@dataclass(frozen=True)
class Setting:
    """How the work is cut: tokens a step, sequences at once, sharing, and how scarce the cache is."""

    budget: int
    seqs: int = 64
    caching: bool = True
    blocks: int = 600
    scarce: bool = (
        False  # too few blocks: the scheduler, which would rather wait, is made to hope for short answers
    )

    def __str__(self) -> str:
        shared = "shared" if self.caching else "private"
        return f"budget{self.budget}-seqs{self.seqs}-{shared}-blocks{self.blocks}"


SETTINGS = (
    Setting(4096),
    Setting(64),
    Setting(7, caching=False),
    Setting(1),
    Setting(4096, caching=False),
    Setting(64, blocks=45, scarce=True),
    Setting(512, blocks=45, caching=False, scarce=True),
)
# Blocks that are scarce for rows that keep no more than their windows, and chunks that fit into so few
SCARCE = {
    "mistral-window": {"blocks": 14, "budget": 64},
    "mixtral-window": {"blocks": 14, "budget": 64},
    "phi3-window-partial": {"blocks": 14, "budget": 64},
    "qwen2-mixed": {"blocks": 90, "budget": 64},
    **{key: {"blocks": 75, "budget": 64} for key in ("gemma2", "gemma3", "cohere2", "gpt-oss")},
}


@dataclass(frozen=True)
class RecordingSampler(Sampler):
    """Keeps the logits from which each token was chosen."""

    seen: dict[tuple[bytes, int], torch.Tensor] = field(default_factory=dict)

    def tries_argmax(self, sequences: list[Sequence]) -> bool:
        return False

    def sample(
        self,
        ops: Ops,
        logits: torch.Tensor,
        sequences: list[Sequence],
        device_tokens: DeviceTokens | None = None,
    ) -> Sampled:
        for row, sequence in enumerate(sequences):
            self.seen[sequence.request.key, sequence.output_length] = logits[row].clone()
        return super().sample(ops, logits, sequences, device_tokens)


def prompts() -> list[list[int]]:
    """Half of the rows begin alike, so that there is something to share."""
    rng = random.Random(11)
    shared = [rng.randrange(250) for _ in range(300)]
    own = [[rng.randrange(250) for _ in range(n)] for n in LENGTHS]
    return own + [shared[: n // 2] + own[i][n // 2 :] for i, n in enumerate(LENGTHS)] + [shared, shared[:]]


@cache
def reference(variant: str) -> tuple[Path, list[list[int]], list[torch.Tensor]]:
    """The checkpoint, transformers' greedy tokens, and the logits that they were chosen from."""
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


def key_of(row: int) -> bytes:
    return row.to_bytes(32, "big")


class PoisoningPool(BlockPool):
    """Fills blocks with NaN as soon as they are free: nothing may read them."""

    def __init__(self, blocks: int, block_size: int, groups: int, caches: list[LayerCache]) -> None:
        super().__init__(blocks, block_size, groups)
        self._caches = caches

    def _free_block(self, block: int) -> None:
        super()._free_block(block)
        for layer in self._caches:
            layer.k[block].fill_(float("nan"))
            layer.v[block].fill_(float("nan"))


def run_engine(
    folder: Path, setting: Setting, requests: list[Request], recorded: bool = True, ops: Ops | None = None
):
    """(completions by key, logits by key and position, steps): integrity is checked after every step."""
    checkpoint, block_size = inspect_checkpoint(folder), 8
    attention = checkpoint.spec.attention
    sizes, latent = (attention.group, attention.head_dim), attention.cache.latent
    ops = ops or choose_ops(torch.device("cpu"), torch.float32, *sizes, latent=latent)
    model = load_decoder(checkpoint, ops, torch.float32, torch.device("cpu"), MAX_LEN)
    cost, cpu = model_cost(checkpoint.spec, 4, 4), torch.device("cpu")
    layout = cache_layout(checkpoint.spec.caches, block_size, MAX_LEN)
    windows = layout.sizes.windows
    caches = allocate_caches(ops, checkpoint.spec.caches, layout, setting.blocks, torch.float32, cpu)
    for layer in caches:  # nothing may read what was never written
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    kind = RecordingSampler if recorded else Sampler
    sampler = kind(frozenset(checkpoint.spec.eos_token_ids))
    runner = ModelRunner(model, ops, caches, layout, sampler, cost, cpu)
    pool = PoisoningPool(setting.blocks, block_size, len(windows), caches)
    config = SchedulerConfig(setting.seqs, setting.budget, setting.caching)
    engine = Engine(
        runner,
        Scheduler(config, pool, Hopeful() if setting.scarce else None, windows),
        EngineLimits(MAX_LEN, sampler.eos_token_ids, checkpoint.spec.long_rope_beyond),
    )
    engine.add(requests)
    done: dict[bytes, Completion] = {}
    steps = []
    for output in engine.drain():
        engine.check_integrity()
        done |= {c.key: c for c in output.completions}
        steps.append(output.sample)
    return done, sampler.seen if isinstance(sampler, RecordingSampler) else {}, steps


def greedy(rows: list[list[int]]) -> list[Request]:
    params = SamplingParams(max_tokens=OUTPUT)
    return [Request(key_of(i), np.array(p, np.int32), params) for i, p in enumerate(rows)]


def cases():
    for variant in VARIANTS:
        for number, setting in enumerate(SETTINGS):
            if variant in FULL or number in (0, 5):
                setting = replace(setting, **SCARCE.get(variant, {})) if setting.scarce else setting
                steps = setting.budget == 1 and variant != "llama"  # thousands
                slow = steps or (variant != "llama" and not setting.scarce)
                marks = [pytest.mark.slow] if slow else []
                yield pytest.param(variant, setting, id=f"{variant}-{setting}", marks=marks)


@pytest.mark.parametrize(("variant", "setting"), list(cases()))
def test_tokens_and_logits_equal_transformers(variant, setting):
    folder, tokens, logits = reference(variant)
    done, seen, steps = run_engine(folder, setting, greedy(prompts()))
    for row, (wanted, scores) in enumerate(zip(tokens, logits, strict=True)):
        assert done[key_of(row)].token_ids.tolist() == wanted
        got = torch.stack([seen[key_of(row), i] for i in range(len(wanted))])
        torch.testing.assert_close(got, scores, atol=1e-4, rtol=1e-4)
    # each setting must really have done what it is there for
    assert (sum(s.cached_tokens for s in steps) > 0) == setting.caching
    assert (sum(s.preemptions for s in steps) > 0) == setting.scarce
    assert (sum(s.recomputed_tokens for s in steps) > 0) == setting.scarce
    assert max(s.prefill_tokens + s.decode_tokens for s in steps) <= setting.budget
    if setting.budget == 64:
        assert any(s.prefill_tokens and s.decode_tokens for s in steps), "no step mixed prefill and decode"


@pytest.mark.parametrize(
    "variant", [pytest.param(v, marks=[] if v in FULL else [pytest.mark.slow]) for v in VARIANTS]
)
def test_tokens_equal_transformers_where_nobody_looks_at_logits(variant):
    folder, tokens, _ = reference(variant)
    done, _, _ = run_engine(folder, Setting(300), greedy(prompts()), recorded=False)
    assert [done[key_of(row)].token_ids.tolist() for row in range(len(tokens))] == tokens


def sampled(rows: list[list[int]]) -> list[Request]:
    kinds = [
        SamplingParams(max_tokens=20, temperature=1.0),
        SamplingParams(max_tokens=20, temperature=0.8, top_k=20, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, temperature=1.5, min_p=0.02, frequency_penalty=0.3, min_tokens=5),
    ]
    keys = np.random.default_rng(4)
    return [Request(keys.bytes(32), np.array(p, np.int32), kinds[i % len(kinds)]) for i, p in enumerate(rows)]


@pytest.mark.parametrize("variant", first_of(("qwen3", "llama"), 1))
def test_a_row_is_the_same_in_any_company_and_order(variant):
    """Greedy and sampled rows, with 1, 7 and 64 sequences at once, and shuffled."""
    folder, _, _ = reference(variant)
    requests = sampled([p for p in prompts() if len(p) <= 129])
    wanted = {k: c.token_ids.tolist() for k, c in run_engine(folder, Setting(4096), requests)[0].items()}
    assert len({tuple(t) for t in wanted.values()}) > len(wanted) // 2
    for setting in (Setting(2048, seqs=1), Setting(64, seqs=7), Setting(300, seqs=64, blocks=60)):
        shuffled = random.Random(setting.seqs).sample(requests, len(requests))
        got, _, _ = run_engine(folder, setting, shuffled)
        assert {k: c.token_ids.tolist() for k, c in got.items()} == wanted


def test_a_row_that_no_cache_could_hold_becomes_an_error():
    folder, _, _ = reference("llama")
    done, _, _ = run_engine(folder, Setting(64, blocks=10), greedy([[1] * 90, [2] * 5]))
    assert done[key_of(0)].error is not None
    assert done[key_of(0)].error.code == "kv_cache_too_small"
    assert done[key_of(1)].finish_reason in ("length", "stop")


def test_stops_lengths_and_limits():
    folder, tokens, _ = reference("llama")
    prompt, first = prompts()[5], tokens[5]
    at = next(i for i in range(1, OUTPUT) if first[i] not in first[:i])
    make = {
        "stop": SamplingParams(max_tokens=OUTPUT, stop_token_ids=(first[at],)),
        "short": SamplingParams(max_tokens=2),
        "long": SamplingParams(max_tokens=10_000, ignore_eos=True),
    }
    requests = [Request(n.encode().ljust(32), np.array(prompt, np.int32), p) for n, p in make.items()]
    done = {k.decode().strip(): c for k, c in run_engine(folder, Setting(64), requests)[0].items()}
    assert (done["stop"].token_ids.tolist(), done["stop"].finish_reason) == (first[: at + 1], "stop")
    assert (done["short"].token_ids.tolist(), done["short"].finish_reason) == (first[:2], "length")
    assert len(done["long"].token_ids) == MAX_LEN - len(prompt)  # the model's context ends it


def test_work_is_accounted_for():
    """Tokens run + tokens shared = tokens of the rows; every sampled token is counted."""
    folder, tokens, _ = reference("llama")
    _, _, steps = run_engine(folder, Setting(64), greedy(prompts()))
    assert sum(s.sampled_tokens for s in steps) == sum(map(len, tokens))
    ran = sum(s.prefill_tokens + s.decode_tokens for s in steps)
    fed_back = sum(len(t) - 1 for t in tokens)
    assert ran + sum(s.cached_tokens for s in steps) == sum(map(len, prompts())) + fed_back
    assert all(s.flops > 0 and s.bytes > 0 and s.roofline_s is None for s in steps)
