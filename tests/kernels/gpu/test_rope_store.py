"""Compares the kernel for RoPE, QK-norm and the KV write with its reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.gpu import rope_store as module
from batchinfer_kernels.gpu.rope_store import rope, rope_store
from batchinfer_kernels.rope_store import quantize_heads_reference, rope_store_reference
from tests.kernels.gpu.pairs import every_pair
from tests.kernels.gpu.poison import poisoned
from tests.kernels.refused import assert_refused

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# One rounding of the stored type at values of about 4, where a contracted product tips it
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


@dataclass
class Case:
    """The inputs of a step: padding rows, random slots, q, k and v as slices of one tensor."""

    tokens: int = 5
    q_heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    pairs: int | None = None
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    normed: bool = False
    interleaved: bool = False
    offset: float = 0.0
    block_size: int = 4
    device: str = "cpu"
    tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.tokens + self.dim)
        shape = (self.tokens, self.q_heads + 2 * self.kv_heads, self.dim)
        fused = torch.randn(shape, generator=generator).to(self.dtype)
        q, k, v = fused.split([self.q_heads, self.kv_heads, self.kv_heads], 1)
        self.table = torch.rand(50, self.pairs or self.dim // 2, generator=generator).to(self.device) * 6
        self.positions = torch.randint(0, 50, (self.tokens,), generator=generator).to(self.device)
        slots = torch.randperm(self.tokens + 7, generator=generator)[: self.tokens]
        slots[1::4] = -1
        found = {"q": q, "k": k, "v": v, "slots": slots}
        self.norms: dict[str, Tensor] = {}
        if self.normed:
            norms = (torch.randn(self.dim, generator=generator).to(self.dtype) for _ in range(2))
            self.norms = dict(zip(("q_norm", "k_norm"), norms, strict=True))
        self.tensors = {name: tensor.to(self.device) for name, tensor in {**found, **self.norms}.items()}

    @property
    def tables(self) -> dict[str, Tensor]:
        """Return angles as tables that the kernel indexes by position."""
        return {"cos": self.table.cos(), "sin": self.table.sin(), "positions": self.positions}

    def caches(self) -> dict[str, Tensor]:
        blocks = -(-(self.tokens + 7) // self.block_size)
        shape = (blocks, self.kv_heads, self.block_size, self.dim)
        kept = self.cache_dtype or self.dtype
        found = {name: torch.full(shape, 7.0, device=self.device).to(kept) for name in ("k_cache", "v_cache")}
        if self.cache_dtype is not None:
            found |= {name: torch.full(shape[:3], 7.0, device=self.device) for name in ("k_scale", "v_scale")}
        return found

    def check(self) -> None:
        ours, theirs = self.caches(), self.caches()
        rows = {name: self.tables[name][self.positions] for name in ("cos", "sin")}
        options = {"eps": 1e-5, "interleaved": self.interleaved, "offset": self.offset}
        wanted = rope_store_reference(**self.tensors, **rows, **theirs, **options)
        for given in (rows, self.tables):
            with poisoned():
                got = rope_store(**self.tensors, **given, **ours, **options)
            tolerance = TOLERANCE[self.dtype]
            torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)
            for name, stored in ours.items():
                self.check_cache(stored, theirs[name])
            with poisoned():
                again = rope(self.tensors["q"], **given, norm=self.norms.get("q_norm"), **options)
            assert torch.equal(again, got), "q has the same bits without k and v"

    def check_cache(self, got: Tensor, wanted: Tensor) -> None:
        if self.cache_dtype is None or got.dim() == 3:
            torch.testing.assert_close(got, wanted, atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype])
            return
        # a value whose last bit differs may fall to the next code
        if self.cache_dtype == torch.int8:
            steps = (got.int() - wanted.int()).abs()
        else:
            steps = (ordered(got) - ordered(wanted)).abs()
        assert steps.max() <= 1
        assert (steps > 0).float().mean() < (1e-3 if self.dtype == torch.float32 else 3e-2)


def ordered(codes: Tensor) -> Tensor:
    """Return float8_e4m3fn as integers in the order of their values."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "normed", "interleaved", "offset", "size"),
    every_pair(
        DTYPES,
        [None, torch.int8, torch.float8_e4m3fn],
        [False, True],
        [False, True],
        [0.0, 1.0],
        [(2, 1), (20, 4), (20, 10), (64, 16), (128, 64), (80, 16), (96, 24), (96, 48), (192, 96), (256, 32)],
    ),
)
def test_equals_the_reference(device, dtype, cache_dtype, normed, interleaved, offset, size):
    """If `interleaved`, neighbours are the pairs. `offset` is added to weights of norms."""
    kind = (dtype, cache_dtype, normed, interleaved, offset)
    Case(5, 6, 2, *size, *kind, device=device).check()


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (7, 1), (48, 3)])
def test_any_number_of_heads(device, tokens, q_heads, kv_heads):
    Case(tokens=tokens, q_heads=q_heads, kv_heads=kv_heads, dim=8, device=device).check()


def test_heads_of_one_token_may_take_several_programs(device, monkeypatch):
    monkeypatch.setattr(module, "TILE", 64)
    Case(q_heads=11, kv_heads=5, dim=20, dtype=torch.bfloat16, normed=True, device=device).check()


def stored_codes(values: Tensor, cache_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return v, [1, 1, D], as quantised by the kernel and by the reference, and the kernel's scales of K
    (equal to V) and V."""
    dim = values.numel()
    x = values.reshape(1, 1, dim)
    cos = torch.ones(1, 1, device=x.device)
    cache = [torch.zeros(1, 1, 1, dim, device=x.device).to(cache_dtype) for _ in range(2)]
    scales = torch.zeros(2, 1, 1, 1, device=x.device)
    slots = torch.zeros(1, dtype=torch.int64, device=x.device)
    rope_store(x, x, x, cos, cos * 0, *cache, slots, k_scale=scales[0], v_scale=scales[1])
    return cache[1].flatten(), quantize_heads_reference(x, cache_dtype)[0].flatten(), scales.flatten()


def test_every_value_and_every_value_between(device):
    """All values of float8_e4m3fn, the middles between them, and their neighbours."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat((middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])))
    size = torch.cat((codes, near, torch.tensor([1e-30])))
    got, wanted, scales = stored_codes(torch.cat((size, -size)).to(device), torch.float8_e4m3fn)
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    assert scales.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_nan_makes_the_scale_of_its_head_nan(device, cache_dtype, broken):
    values = torch.tensor([1.0, broken, -2.0, 0.5], device=device)
    got, wanted, scales = stored_codes(values, cache_dtype)
    assert torch.equal(got.float(), wanted.float())
    assert scales.isnan().all()


def test_a_rounded_half_is_even_in_int8(device):
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.0, -127.0, 0.49999997, -3.7])
    got, wanted, _ = stored_codes(values.to(device), torch.int8)
    assert got.tolist() == wanted.tolist() == [0, 2, 2, 0, -2, -2, 126, 127, -127, 0, -4]


WRONG_TABLES = [
    {"cos": torch.ones(5, 33), "sin": torch.ones(5, 33)},
    {"cos": torch.ones(4, 32), "sin": torch.ones(4, 32)},
    {"cos": torch.ones(5, 32).double(), "sin": torch.ones(5, 32).double()},
]
WRONG_STEPS = [
    {"k_scale": torch.ones(3, 2, 4)},
    {"q_norm": torch.ones(64)},
    {"slots": torch.zeros(5, dtype=torch.int32)},
    {"v": torch.ones(5, 3, 64)},
    {"k_cache": torch.zeros(3, 2, 4, 64, dtype=torch.int8)},
]
WRONG_ALONE = [
    {"norm": torch.ones(64).bfloat16()},
    {"norm": torch.ones(63)},
    {"positions": torch.zeros(4, dtype=torch.int64)},
]


def test_wrong_operands_are_refused():
    case, table = Case(), torch.ones(5, 32)
    alone = {"q": case.tensors["q"], "cos": table, "sin": table}
    for changed in (*WRONG_TABLES, *WRONG_ALONE):
        assert_refused("", rope, **{**alone, **changed})
    for changed in (*WRONG_TABLES, *WRONG_STEPS):
        assert_refused("", rope_store, **{**case.tensors, **case.caches(), **alone, **changed})
