"""Tests that `engine.deterministic: true` gives each row the same bits in any batch and with any chunks.

Answers are forced: all logits of all rows are compared, not only the chosen tokens.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.errors import Unavailable
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.models.ops import choose
from batchinfer.models.ops.cpu_ops import CpuOps
from batchinfer_kernels.arithmetic import Dtype, KvCacheDtype, Quantization
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.cpu.compilers import NoCompiler
from batchinfer_kernels.tiles import Grant
from tests.batchinfer.engine.teacher_forced import Forced, Row, Way, different, load, run_alone
from tests.checkpoints import kept_folder, make_checkpoint
from tests.examples import examples
from tests.kernels.gpu.pairs import each_first

ANSWER = 9
SHARED = 150  # tokens that eight rows begin with; three each of them share as many more
MODELS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"num_key_value_heads": 1}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "qwen2-moe": ("qwen2_moe", {}),
    # heads, groups and widths of real models, and an odd number of outputs
    "llama-wide": ("llama", {"hidden_size": 256, "head_dim": 64, "intermediate_size": 391, "vocab": 1021}),
}
ARITHMETICS: tuple[tuple[Dtype, Quantization], ...] = (
    ("float32", "none"),
    ("bfloat16", "none"),
    ("bfloat16", "int8"),
    ("float32", "int8"),
)
WAYS = (
    *(Way(budget) for budget in (1, 7, 64, 512, 4096)),
    *(Way(budget, caching=False) for budget in (7, 64, 4096)),
    Way(512, seqs=3),
    Way(512, seqs=3, backwards=True),
    Way(64, blocks=22),
    Way(512, blocks=32, caching=False, threads=2),
    Way(64, threads=2),
    Way(4096, threads=2),
    Way(4096, caching=False, threads=2, backwards=True),
)


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(count)]


@cache
def rows() -> tuple[Row, ...]:
    """Return separate prompts whose lengths cross blocks and tiles, and a prefix tree of two levels."""
    alone = [tokens(n, n) for n in (1, 2, 7, 16, 17, 33, 64, 65, 129, 200, 300)]
    trunk = tokens(1000, SHARED)
    tree = [trunk + tokens(2000 + n // 3, SHARED) + tokens(3000 + n, 2 * n + 1) for n in range(6)]
    tree += [trunk + tokens(4000, 5), trunk]
    return tuple(Row(prompt, tokens(9000 + n, ANSWER)) for n, prompt in enumerate(alone + tree))


@cache
def checkpoint(name: str) -> Path:
    family, options = MODELS[name]
    folder = kept_folder()
    make_checkpoint(folder, family, seed=5, **options)
    return folder


@cache
def yardstick(
    name: str, dtype: Dtype, quantization: Quantization, kv_cache: KvCacheDtype = "auto"
) -> tuple[LoadedModel, dict]:
    """Return the model and the logits of each row alone."""
    loaded = load(checkpoint(name), dtype, quantization, kv_cache=kv_cache)
    return loaded, run_alone(loaded, rows())


def cases():
    """Yield a case per way and arithmetic; other llama cases only for a fifth, unless everything is tested."""
    for name in MODELS:
        for turn, (dtype, quantization) in enumerate(ARITHMETICS):
            for number, way in enumerate(WAYS):
                quick = number == (2, 11)[turn % 2] or (name == "llama" and (number + turn) % 5 == 0)
                slow = way.budget == 1 or not quick
                marks = [pytest.mark.slow] if slow else []
                yield pytest.param(
                    name, dtype, quantization, way, id=f"{name}-{dtype}-{quantization}-{way}", marks=marks
                )


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "dtype", "quantization", "way"), list(cases()))
def test_a_row_has_the_same_bits_however_the_work_is_split(name, dtype, quantization, way):
    loaded, wanted = yardstick(name, dtype, quantization)
    forced = Forced(loaded, rows(), way)
    assert different(forced.run(), wanted) == []
    # guard: each way had its effect
    assert (sum(s.cached_tokens for s in forced.steps) > 0) == way.caching
    assert (sum(s.copied_tokens for s in forced.steps) > 0) == way.caching
    assert (sum(s.preemptions for s in forced.steps) > 0) == (way.blocks is not None)
    assert any(s.decode_tokens > 1 for s in forced.steps) or way.budget == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [1, 9, 11, 12])
def test_a_quantised_cache_is_deterministic_too(dtype, number):
    """Micro-batches of prompts, shared prefixes, scarce blocks and two threads."""
    loaded, wanted = yardstick("llama-wide", dtype, "none", "int8")
    assert different(Forced(loaded, rows(), WAYS[number]).run(), wanted) == []
    _, values = yardstick("llama-wide", dtype, "none")
    assert different(values, wanted) != [], "there are no codes"


def few_rows() -> tuple[Row, ...]:
    """Return short rows and a part of the tree, for slow cases."""
    return *rows()[2:6], *rows()[11:14]


@cache
def in_tiles(name: str, quantization: Quantization) -> tuple[LoadedModel, dict]:
    """Return `yardstick` in bfloat16 with matrix tiles in C."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "tile_grant", lambda: Grant(True))
        patch.setattr(
            choose, "CompiledOperators", lambda tiles, codes: CompiledOperators(tiles="emulated", codes=codes)
        )
        loaded = load(checkpoint(name), "bfloat16", quantization, tiles=True)
    assert loaded.info.linear.endswith("in tiles")
    return loaded, run_alone(loaded, few_rows())


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "quantization"), each_first(("llama-wide", "qwen2-moe"), ("none", "int8")))
@pytest.mark.parametrize("way", [Way(64), pytest.param(Way(4096, threads=2), marks=pytest.mark.slow)])
def test_matrix_tiles_keep_the_promise(name, quantization, way):
    """Decoding uses tiles of one row, prefill tiles of sixteen."""
    loaded, wanted = in_tiles(name, quantization)
    assert different(Forced(loaded, few_rows(), way).run(), wanted) == []


@pytest.mark.sample(4)
@pytest.mark.parametrize(("dtype", "quantization"), ARITHMETICS)
@pytest.mark.parametrize("caching", [True, False])
def test_prefixes_that_are_read_once_for_all_change_nothing(monkeypatch, dtype, quantization, caching):
    """The prefix tree is attended level by level, or each row attends to its own copy."""
    loaded, wanted = yardstick("llama", dtype, quantization)
    plan, levels = CpuOps.plan_attention, []

    def watched(*arguments):
        made = plan(*arguments)
        levels.append(made.items.levels)
        return made

    monkeypatch.setattr(CpuOps, "plan_attention", watched)
    assert different(Forced(loaded, rows(), Way(4096, caching=caching)).run(), wanted) == []
    assert max(levels) == (3 if caching else 1), "two shared levels, and the own part of each row"


@pytest.mark.sample(2)
@pytest.mark.parametrize(("dtype", "quantization"), ARITHMETICS)
def test_the_block_size_in_vectors_changes_nothing(dtype, quantization):
    """Tiles are at fixed positions. A block of another size would leave gaps in them and change sums."""
    _, wanted = yardstick("llama", dtype, quantization)
    for size in (32, 48):
        loaded = load(checkpoint("llama"), dtype, quantization, block_size=size)
        assert different(Forced(loaded, rows(), Way(64)).run(), wanted) == []


@settings(max_examples=examples(2, 25), deadline=None)
@given(st.sampled_from(ARITHMETICS), st.integers(0, 10**6), st.booleans())
def test_random_company(arithmetic, seed, caching):
    """Rows arrive in random groups and order, with random limits, and read K and V that other batches wrote."""
    loaded, wanted = yardstick("llama", *arithmetic)
    rng = random.Random(seed)
    way = Way(rng.choice((5, 33, 130, 2048)), rng.randint(1, 20), caching, threads=rng.randint(1, 2))
    forced = Forced(loaded, rows(), way)
    for _ in range(2):
        chosen = rng.sample(range(len(rows())), rng.randint(2, len(rows())))
        got = dict(forced.run(chosen))
        forced.sampler.seen.clear()
        assert different(got, {place: wanted[place] for place in wanted if place[0] in chosen}) == []


@pytest.mark.sample(3)
@pytest.mark.parametrize("block_size", [5, 16, 32])
@pytest.mark.parametrize("deterministic", [True, False])
def test_copied_blocks_change_no_bit_or_little_in_the_default_mode(block_size, deterministic):
    """K and V have eight bits of mantissa. In the default mode a copied block may come from another step,
    with another order of sums: each token is within tolerance of the most likely one."""
    chosen = (*few_rows(), *rows()[17:])
    runs = []
    for least in (None, 1):
        loaded = load(checkpoint("llama"), "bfloat16", deterministic=deterministic, block_size=block_size)
        limits = replace(loaded.limits, least_copied=least)
        forced = Forced(replace(loaded, limits=limits), chosen, Way(64))
        runs.append(forced.run())
        assert (sum(step.copied_tokens for step in forced.steps) > 0) == (least is not None)
    wanted, found = runs
    assert wanted.keys() == found.keys()
    assert not deterministic or different(found, wanted) == []
    for place, row in wanted.items():
        off = found[place].max() - found[place][row.argmax()]
        assert off <= 8 * torch.finfo(torch.bfloat16).eps * row.abs().max()


def refuse(**_: object) -> None:
    raise NoCompiler("no C compiler: none of cc, gcc, clang is there")


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_deterministic_is_refused_without_a_compiler(monkeypatch, quantization):
    """torch's operators select their order of sums by the batch's shape, and are not deterministic."""
    monkeypatch.setattr("batchinfer.models.ops.choose.CompiledOperators", refuse)
    with pytest.raises(Unavailable, match=r"needs? the compiled CPU operators.*no C compiler"):
        load(checkpoint("llama"), "float32", quantization)


def test_deterministic_is_refused_for_dtypes_without_compiled_operators():
    with pytest.raises(Unavailable, match=r"engine\.deterministic: true.*float16"):
        load(checkpoint("llama"), "float16")
