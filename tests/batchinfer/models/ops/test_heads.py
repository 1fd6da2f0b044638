"""Tests that logits are float32 on every path, which separates close ones in greedy decoding."""

from __future__ import annotations

import pytest
import torch

from batchinfer.models.ops import torch_ops
from batchinfer.models.ops.cpu_ops import CpuOps
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.tiles import TileWay

HIDDEN, VOCAB = 64, 300


def triton_ops() -> Ops:
    pytest.importorskip("triton")
    from batchinfer.models.ops.triton_ops import TritonOps
    from batchinfer_kernels.gpu.attention_plan import AttentionShape

    return TritonOps(AttentionShape(torch.bfloat16, 4, 2, 16))


def compiled_ops(tiles: TileWay | None = None) -> Ops:
    return CpuOps(CompiledOperators(tiles=tiles), 2)


@pytest.mark.parametrize("kind", ["torch", "compiled", "tiles", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_close_logits_of_large_magnitude_differ(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near -148, bfloat16 has steps of 1; these logits differ by at most a quarter."""
    monkeypatch.setattr(torch_ops, "WIDENED_VALUES", 7 * HIDDEN)
    ops = {
        "torch": TorchOps,
        "compiled": compiled_ops,
        "tiles": lambda: compiled_ops("emulated"),
    }
    head = (ops.get(kind) or triton_ops)().pack_head(weight := special_weight(dtype))
    x = torch.ones(9, HIDDEN, dtype=dtype)
    x[:, 1:] = torch.randn(9, HIDDEN - 1, generator=torch.Generator().manual_seed(3)).to(dtype)
    wanted = x.double() @ weight.double().T
    logits = head(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), wanted, atol=1e-4, rtol=1e-5)
    assert torch.equal(head.argmax(x), wanted.argmax(-1))
    rounded = wanted.bfloat16().float().argmax(-1)
    assert not torch.equal(rounded, wanted.argmax(-1)), "the case does not need float32 logits"


def special_weight(dtype: torch.dtype) -> torch.Tensor:
    """Return a weight, [VOCAB, HIDDEN], whose first input adds -148 to every logit."""
    weight = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(4)) * 0.02
    weight[:, 0] = -148.0
    return weight.to(dtype)
