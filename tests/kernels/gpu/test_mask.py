"""The mask kernel changes logits as its reference does."""

from __future__ import annotations

import pytest
import torch

from batchinfer_kernels.gpu.mask import mask
from batchinfer_kernels.mask import mask_reference, mask_words
from tests.kernels.gpu.sampling_cases import some_logits


@pytest.mark.parametrize("vocab", [5, 64, 2100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_reference(device, vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    bits = torch.randint(-(2**31), 2**31, (3, mask_words(vocab)), generator=generator).int()
    rows = torch.tensor([3, 0, 2], dtype=torch.int32)
    logits = some_logits(4, vocab + 3, 2.0).to(dtype)[:, :vocab]  # strided
    wanted = logits.clone()
    mask_reference(wanted, rows, bits)
    got = logits.to(device)
    mask(got, rows.to(device), bits.to(device))
    assert torch.equal(got.cpu(), wanted)


def test_no_rows(device):
    logits = some_logits(2, 40, 1.0, device)
    before = logits.clone()
    none = torch.zeros(0, dtype=torch.int32, device=device)
    mask(logits, none, none.view(0, 1).expand(0, 2))
    assert torch.equal(logits, before)


def test_bits_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="bits"):
        mask(torch.zeros(1, 40), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32))
