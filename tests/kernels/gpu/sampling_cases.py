"""Rows with parameters of all kinds, for tests of sampling."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from batchinfer_kernels.penalties import Penalties
from batchinfer_kernels.sample import RowSampling

Rows = TypeVar("Rows", RowSampling, Penalties)
# Each filter separately, all together, and greedy rows between
KINDS: tuple[dict[str, float], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.5, "top_p": 0.999},
    {"temperature": 2.0, "top_k": 1},
)


def random_kinds(random: np.random.Generator, rows: int, top_k: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        {
            "temperature": random.choice([0.0, 0.3, 1.0, 3.0]),
            "top_k": int(random.choice(top_k)),
            "top_p": random.choice([1.0, 0.2, 0.9, 0.999]),
            "min_p": random.choice([0.0, 0.0, 0.1, 1.0]),
        }
        for _ in range(rows)
    ]


def row_sampling(kinds: list[dict[str, Any]], device: str = "cpu", seed: int = 0) -> RowSampling:
    """Return the parameters of rows with random generator keys and positions 0, 1…"""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.tensor([kind.get(name, default) for kind in kinds], dtype=dtype, device=device)

    words = np.random.default_rng(seed).integers(-(2**31), 2**31, (len(kinds), 4), np.int64)
    return RowSampling(
        column("temperature", 0.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float64),
        column("min_p", 0.0, torch.float64),
        torch.from_numpy(words.astype(np.int32)).to(device),
        torch.arange(len(kinds), dtype=torch.int32, device=device),
    )


def some_logits(rows: int, vocab: int, spread: float, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * spread).to(device)


def penalties_of(
    histories: list[tuple[list[int], list[int]]], banned: list[list[int]], rows: list[int], device: str
) -> Penalties:
    """Return the penalties of rows.

    Args:
        histories: prompt and answer of each row. They are stored in another order, with gaps.
    """
    width, n = max([len(b) for b in banned], default=0), len(rows)
    tokens, starts = [99], [0] * n
    for i in reversed(range(n)):
        starts[i] = len(tokens)
        tokens += [*histories[i][0], *histories[i][1], 5]
    spread = torch.arange(n, dtype=torch.float32)
    found = Penalties(
        torch.tensor(rows, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int64),
        torch.tensor([len(p) for p, _ in histories], dtype=torch.int32),
        torch.tensor([len(p) + len(a) for p, a in histories], dtype=torch.int32),
        torch.where(spread % 3 == 1, 1.0, 1.1 + spread / 7),
        spread / 10,
        0.3 - spread / 20,
        torch.tensor([b + [-1] * (width - len(b)) for b in banned], dtype=torch.int32).reshape(n, width),
    )
    return moved(found, device)


def moved(rows: Rows, device: str) -> Rows:
    return replace(rows, **{field.name: getattr(rows, field.name).to(device) for field in fields(rows)})
