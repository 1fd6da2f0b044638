"""RMSNorm with the residual, RoPE with the KV write, and the gate, at the 8B Llama shape: all bound by memory."""

from __future__ import annotations

from collections.abc import Callable
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
from tests.gpu_suite.case import TOLERANCE, Case, distance, measured
from tests.suite.section import BenchSection, Part

HIDDEN, INTERMEDIATE, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4096, 14336, 32, 8, 128, 16
TOKENS, FEW = 8192, 64  # of a step of prefill, and of one of decode
EPS = 1e-5


def parts(section: BenchSection) -> list[Part]:
    """Return a part a case."""
    sizes = (3,) if section.rehearsal else (TOKENS, FEW)
    makers = (rms_norm_case, rope_store_case, gated_activation_case)
    return [_part(section, make, tokens) for tokens in sizes for make in makers]


def _part(section: BenchSection, make: Callable[[BenchSection, int], Case], tokens: int) -> Part:
    return f"{make.__name__} {tokens}", lambda: measured(section, make(section, tokens))


def rms_norm_case(section: BenchSection, tokens: int) -> Case:
    x, residual = (_random(section, tokens, HIDDEN) for _ in range(2))
    weight = _random(section, HIDDEN)
    ours = partial(rms_norm, x, weight, EPS, residual)
    right = rms_norm_reference(x, weight, EPS, residual)

    def theirs() -> Tensor:
        return torch.nn.functional.rms_norm(x + residual, (HIDDEN,), weight, EPS)

    return Case(
        "RMSNorm with residual",
        f"{tokens} × {HIDDEN}",
        rms_norm_cost(tokens, HIDDEN, 2, residual=True),
        _name(x),
        ours,
        lambda: max(map(distance, ours(), right)),
        TOLERANCE[x.dtype],
        {"torch": theirs},
    )


def rope_store_case(section: BenchSection, tokens: int) -> Case:
    """Slots in random order, q, k and v slices of one tensor, as after one product."""
    device, width = section.device, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
    qkv = _random(section, tokens, width).view(tokens, -1, HEAD_DIM)
    q, k, v = torch.split(qkv, [Q_HEADS, KV_HEADS, KV_HEADS], 1)
    angles = torch.rand(tokens, HEAD_DIM // 2, device=device) * 6.0
    rope = (angles.cos(), angles.sin())
    slots = torch.randperm(-(-tokens // BLOCK) * BLOCK, device=device)[:tokens]
    mine, theirs = (_caches(section, tokens) for _ in range(2))
    ours = partial(rope_store, q, k, v, *rope, *mine, slots)

    def error() -> float:
        right = rope_store_reference(q, k, v, *rope, *theirs, slots)
        return max(distance(ours(), right), *map(distance, mine, theirs))

    return Case(
        "RoPE with KV write",
        f"{tokens} × ({Q_HEADS} + 2 × {KV_HEADS}) × {HEAD_DIM}",
        rope_store_cost(tokens, Q_HEADS, KV_HEADS, HEAD_DIM, 2),
        _name(q),
        ours,
        error,
        TOLERANCE[q.dtype],
    )


def gated_activation_case(section: BenchSection, tokens: int) -> Case:
    gate_up = _random(section, tokens, 2 * INTERMEDIATE)
    ours = partial(gated_activation, gate_up, "silu")
    right = gated_activation_reference(gate_up, "silu")

    def theirs() -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    return Case(
        "gated activation",
        f"{tokens} × {INTERMEDIATE}",
        gated_activation_cost(tokens, INTERMEDIATE, 2),
        _name(gate_up),
        ours,
        lambda: distance(ours(), right),
        TOLERANCE[gate_up.dtype],
        {"torch": theirs},
    )


def _caches(section: BenchSection, tokens: int) -> tuple[Tensor, Tensor]:
    shape = (-(-tokens // BLOCK), KV_HEADS, BLOCK, HEAD_DIM)
    k, v = (torch.zeros(shape, dtype=torch.bfloat16, device=section.device) for _ in range(2))
    return k, v


def _random(section: BenchSection, *shape: int) -> Tensor:
    return torch.randn(shape, device=section.device).to(torch.bfloat16)


def _name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
