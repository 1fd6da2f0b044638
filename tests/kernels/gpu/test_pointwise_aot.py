"""Compiles kernels around the matrix products for GPUs: nothing spills, and loads are wide."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from batchinfer_kernels.advance_rows import StepRows
from batchinfer_kernels.experts import Choice
from batchinfer_kernels.gpu.advance_rows import advance_rows
from batchinfer_kernels.gpu.choose_experts import choose_experts
from batchinfer_kernels.gpu.combine import combine
from batchinfer_kernels.gpu.copy_parts import copy_parts
from batchinfer_kernels.gpu.draft_tree import move_slots, tree_paths
from batchinfer_kernels.gpu.gated_activation import gated_activation
from batchinfer_kernels.gpu.log_probabilities import log_probabilities
from batchinfer_kernels.gpu.mask import mask
from batchinfer_kernels.gpu.penalties import penalise
from batchinfer_kernels.gpu.rms_norm import rms_norm
from batchinfer_kernels.gpu.rope_store import rope, rope_store
from batchinfer_kernels.gpu.sample import sample
from batchinfer_kernels.gpu.sort_by_expert import sort_by_expert
from batchinfer_kernels.mask import mask_words
from batchinfer_kernels.routing import Routing
from tests.kernels.gpu.aot import NVIDIA, TARGETS, compile_launch
from tests.kernels.gpu.pairs import each_first, every_pair
from tests.kernels.gpu.sampling_cases import penalties_of, row_sampling
from tests.kernels.gpu.test_rope_store import Case

VOCAB = 151_936
DTYPES = ("bfloat16", "float16", "float32")
CODES = (None, "int8", "float8_e4m3fn")
SIZES = (64, 80, 96, 256)  # of heads
ROUTINGS = (  # of Qwen3, GPT-OSS and DeepSeek-V3
    Routing(128, 8, normalised=True),
    Routing(32, 4, "softmax_of_chosen"),
    Routing(256, 8, "sigmoid", True, 2.5, corrected=True, groups=8, chosen_groups=4, group_score="top_two"),
    Routing(512, 10, normalised=True),
)


def zeros(dtype: str, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=getattr(torch, dtype))


# ---- launches for the compiler: arguments are JSON's types


def launch_gated_activation(dtype: str, intermediate: int, activation: Any) -> None:
    gated_activation(zeros(dtype, 16, 2 * intermediate), activation)


def launch_rms_norm(dtype: str, hidden: int, residual: bool, offset: float) -> None:
    x = zeros(dtype, 16, hidden)
    rms_norm(x, x[0], 1e-5, x if residual else None, offset)


def launch_mask(dtype: str) -> None:
    bits = torch.zeros((16, mask_words(VOCAB)), dtype=torch.int32)
    mask(zeros(dtype, 16, VOCAB), torch.arange(16, dtype=torch.int32), bits)


def launch_copy_parts(dtype: str) -> None:
    copy_parts(*(zeros(dtype, 64, 8, 16, 128) for _ in "kv"), torch.zeros(5, 4, dtype=torch.int64))


def launch_tree_paths(places: int, ordered: bool) -> None:
    tokens, nodes = torch.zeros(64).long(), torch.zeros(4, places).long()
    tree_paths(tokens, tokens[:4], nodes, nodes, *((tokens[:4], tokens) if ordered else ()))


def launch_advance_rows(groups: int, reads_contexts: bool) -> None:
    rows = torch.zeros(16).long()
    contexts = rows.int() if reads_contexts else None
    for group in range(groups):
        both = (None, None) if group else (rows, rows)
        kept = StepRows(torch.zeros(16, 64).int(), 16, rows, contexts, *both)
        advance_rows(rows, 1, rows.int(), rows.int(), kept)


def launch_move_slots(dtype: str, dim: int, places: int) -> None:
    slots = torch.zeros(4, places).long()
    move_slots([zeros(dtype, 64, 8, 16, dim)] * 3, slots, slots.int())


def launch_log_probabilities(dtype: str) -> None:
    log_probabilities(zeros(dtype, 16, VOCAB), torch.zeros(16).long(), 20)


def launch_penalise(dtype: str) -> None:
    histories = [(list(range(100)), list(range(60)))] * 16
    penalise(zeros(dtype, 16, VOCAB), penalties_of(histories, [[1, 2, 3]] * 16, list(range(16)), "cpu"))


def launch_sample(dtype: str, vocab: int, drawn: bool) -> None:
    sample(zeros(dtype, 16, vocab), row_sampling([{}] * 16) if drawn else None)


def launch_combine(dtype: str, tokens: int, chosen: int, width: int) -> None:
    made = zeros(dtype, tokens * chosen, width)
    combine(made, torch.arange(len(made)), torch.zeros(tokens, chosen))


def launch_choose_experts(number: int) -> None:
    routing = ROUTINGS[number]
    correction = torch.zeros(routing.experts) if routing.corrected else None
    choose_experts(torch.zeros(64, routing.experts), routing, correction)


def launch_sort_by_expert(experts: int, counted: bool) -> None:
    choice = Choice(torch.zeros(1024, 8).long(), torch.zeros(1024, 8), torch.zeros(experts).int())
    sort_by_expert(choice, torch.zeros(experts).long(), torch.zeros(1024).bool() if counted else None)


def launch_rope_store(
    dtype: str, codes: str | None, dim: int, pairs: int, normed: bool, interleaved: bool
) -> None:
    cache_dtype = None if codes is None else getattr(torch, codes)
    case = Case(16, 32, 8, dim, pairs, getattr(torch, dtype), cache_dtype, normed, interleaved, block_size=16)
    rope_store(**case.tensors, **case.tables, **case.caches(), interleaved=interleaved)


def launch_rope(dtype: str, normed: bool, interleaved: bool) -> None:
    case = Case(16, 32, 8, 128, dtype=getattr(torch, dtype), normed=normed)
    rope(case.tensors["q"], **case.tables, norm=case.norms.get("q_norm"), interleaved=interleaved)


# ---- the tests


class Kind(NamedTuple):
    """Arguments of a launch, its number of kernels, and each kernel's minimum of 16-byte loads and stores."""

    arguments: tuple[Any, ...]
    kernels: int = 1
    loads: int = 0
    stores: int = 0


KINDS = {
    "gated_activation": [  # gate and up
        Kind(("bfloat16", 14_336, "silu"), loads=2, stores=1),
        Kind(("float32", 14_336, "gelu"), loads=2, stores=1),
        Kind(("float16", 100, "gelu_tanh")),
        Kind(("bfloat16", 1536, "clamped_swiglu")),
    ],
    "rms_norm": [  # x, residual and weight
        Kind(("bfloat16", 4096, True, 0.0), loads=3, stores=2),
        Kind(("bfloat16", 4096, True, 1.0), loads=3, stores=2),
        Kind(("float32", 16_384, True, 0.0), loads=3, stores=2),
        Kind(("float16", 20_480, True, 0.0), loads=3, stores=2),
        *(Kind((dtype, hidden, False, 0.0)) for dtype in DTYPES for hidden in (64, 576, 5120)),
    ],
    "mask": [Kind(("float32",)), Kind(("bfloat16",))],
    "copy_parts": [Kind(("float32",)), Kind(("bfloat16",)), Kind(("int8",))],
    "tree_paths": [Kind((8, True)), Kind((32, False))],
    "advance_rows": [Kind((2, True), 2), Kind((1, False))],
    "move_slots": [Kind(("bfloat16", 128, 8)), Kind(("float32", 4096, 32)), Kind(("int8", 1, 7))],
    "log_probabilities": [Kind(("float32",), 2, loads=1), Kind(("bfloat16",), 2, loads=1)],
    "penalise": [Kind(("float32",)), Kind(("bfloat16",))],
    "sample": [
        Kind(("float32", VOCAB, True), 7, loads=1),
        *(Kind((dtype, 50_257, False), 2) for dtype in DTYPES[:2]),
        Kind(("bfloat16", 262_144, True), 7),
    ],
    "choose_experts": [Kind((number,)) for number in range(len(ROUTINGS))],
    "sort_by_expert": [Kind((128, True)), Kind((256, False)), Kind((8, True))],
    "combine": [Kind(("bfloat16", 64, 8, 2048), loads=1, stores=1)],
    "rope_store": [  # halves of q, of k, and v
        Kind(("bfloat16", None, 128, 64, True, False), loads=5, stores=5),
        Kind(("float32", "int8", 128, 64, False, False), loads=5),
        Kind(("float16", "float8_e4m3fn", 128, 64, True, True), loads=5),
        *(
            Kind(case)
            for case in every_pair(DTYPES, CODES, SIZES, (16, 24, 32), (False, True), (False, True))
        ),
    ],
    "rope": [Kind(("bfloat16", True, False)), Kind(("float32", False, True))],
}


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("name", "target", "kind"),
    [
        pytest.param(
            name, *case.values, marks=case.marks, id=f"{name}-{case.values[0]}-{case.values[1].arguments}"
        )
        for name, kinds in KINDS.items()
        for case in each_first(TARGETS, kinds)
    ],
)
def test_compiles(name: str, target: str, kind: Kind) -> None:
    found = compile_launch(f"tests.kernels.gpu.test_pointwise_aot:launch_{name}", kind.arguments, target)
    assert len(found) == kind.kernels
    for kernel in found:
        kernel.check()
        if target in NVIDIA:
            assert kernel.wide_loads() >= kind.loads, kernel.summary()
            assert kernel.wide_stores() >= kind.stores, kernel.summary()
