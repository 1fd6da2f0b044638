"""RMSNorm with residual, RoPE with KV write, and the gate at the 8B Llama shape: all memory-bound."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from batchinfer_kernels.cost import gated_activation_cost, rms_norm_cost, rope_store_cost
from batchinfer_kernels.gated_activation import gated_activation_reference
from batchinfer_kernels.gpu.gated_activation import gated_activation
from batchinfer_kernels.gpu.rms_norm import rms_norm
from batchinfer_kernels.gpu.rope_store import rope_store
from batchinfer_kernels.rms_norm import rms_norm_reference
from batchinfer_kernels.rope_store import rope_store_reference
from tests.gpu_suite.case import DTYPE, Case, distance, part, random
from tests.suite.section import BenchSection, Part

HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4096, 14336, 32, 8, 128, 16
TOKENS, FEW = 8192, 64  # of a step of prefill, and of one of decode
EPS = 1e-5


def parts(section: BenchSection) -> list[Part]:
    """Return a part per case."""
    sizes = (3,) if section.rehearsal else (TOKENS, FEW)
    makers = (rms_norm_case, rope_store_case, gated_activation_case)
    return [part(section, make, tokens) for tokens in sizes for make in makers]


def rms_norm_case(section: BenchSection, tokens: int) -> Case:
    x, residual = (random(section, tokens, HIDDEN) for _ in range(2))
    weight = random(section, HIDDEN)

    def theirs() -> Tensor:
        return torch.nn.functional.rms_norm(x + residual, (HIDDEN,), weight, EPS)

    return Case(
        "RMSNorm with residual",
        f"{tokens} × {HIDDEN}",
        rms_norm_cost(tokens, HIDDEN, 2, residual=True),
        partial(rms_norm, x, weight, EPS, residual),
        partial(rms_norm_reference, x, weight, EPS, residual),
        {"torch": theirs},
    )


def rope_store_case(section: BenchSection, tokens: int) -> Case:
    """Return a case with slots in random order, and q, k and v as slices of one tensor."""
    device, width, blocks = section.device, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM, -(-tokens // BLOCK)
    qkv = random(section, tokens, width).view(tokens, -1, HEAD_DIM)
    angles = torch.rand(tokens, HEAD_DIM // 2, device=device) * 6.0
    q, k, v = torch.split(qkv, [Q_HEADS, KV_HEADS, KV_HEADS], 1)
    operands = (q, k, v, angles.cos(), angles.sin())
    slots = torch.randperm(blocks * BLOCK, device=device)[:tokens]
    caches = torch.zeros(4, blocks, KV_HEADS, BLOCK, HEAD_DIM, dtype=DTYPE, device=device)
    mine, theirs = (caches[0], caches[1]), (caches[2], caches[3])

    def right() -> tuple[Tensor, ...]:
        return rope_store_reference(*operands, *theirs, slots), *theirs

    return Case(
        "RoPE with KV write",
        f"{tokens} × ({Q_HEADS} + 2 × {KV_HEADS}) × {HEAD_DIM}",
        rope_store_cost(tokens, Q_HEADS, KV_HEADS, HEAD_DIM, 2),
        partial(rope_store, *operands, *mine, slots),
        right,
        off=lambda q, wanted: distance((q, *mine), wanted),
    )


def gated_activation_case(section: BenchSection, tokens: int) -> Case:
    gate_up = random(section, tokens, 2 * INTERMEDIATE)

    def theirs() -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    return Case(
        "gated activation",
        f"{tokens} × {INTERMEDIATE}",
        gated_activation_cost(tokens, INTERMEDIATE, 2),
        partial(gated_activation, gate_up, "silu"),
        partial(gated_activation_reference, gate_up, "silu"),
        {"torch": theirs},
    )
