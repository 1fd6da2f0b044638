"""Tests that GPTQ zero points are read as their packers meant them, and wrong ones are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchinfer.core.errors import JobFileError
from batchinfer.job import load_job
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.files.config_fields import read_config_json
from batchinfer.models.files.fingerprint import model_fingerprint
from batchinfer.models.files.weight_files import StoredTensor
from batchinfer.models.formats.gptq import GptqTensor, gptq_format
from batchinfer.models.formats.zero_layout import FIRST, ZeroLayout
from batchinfer.verbs.validate import validate_job
from tests.batchinfer.pipeline.test_pipeline import write_job
from tests.checkpoints import edit_json, make_tokenizer
from tests.packed_weights import SINGLE
from tests.published_formats import PUBLISHED, gptq, make_published

OUTPUTS, INPUTS, GROUP = 64, 64, 32
PLAIN = {"prompt": {"text": "text", "system": None, "user": None}}
LAYOUT = ZeroLayout(FIRST, FIRST, symmetric=False)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_zero_points_equal_the_packed_ones(bits: int) -> None:
    """Every second zero point is 0, and the subtraction borrows in a majority of words. Dequantised, in int4,
    and on two ranks."""
    generator = np.random.default_rng(bits)
    matrix = generator.normal(size=(OUTPUTS, INPUTS)).astype(np.float32)
    zeros = generator.integers(0, 2**bits, (OUTPUTS, INPUTS // GROUP)) * generator.integers(
        0, 2, (OUTPUTS, 1)
    )
    tensors, values = gptq(bits, GROUP, 1, zeros=zeros)(matrix, generator)
    whole = GptqTensor((OUTPUTS, INPUTS), ("qweight", "scales", "qzeros"), bits, GROUP, False, LAYOUT)
    wanted = torch.from_numpy(values).float()
    torch.testing.assert_close(whole.dequantize(tensors.__getitem__), wanted)
    for rank in range(2):
        half = (rank * 32, rank * 32 + 32)
        for ranges, part in (
            ((half, (0, INPUTS)), wanted[slice(*half)]),
            (((0, OUTPUTS), half), wanted[:, slice(*half)]),
        ):
            found, slices = whole.slice(*ranges)
            read = {name: tensors[name][slices[name]] for name in whole.stored}
            torch.testing.assert_close(found.dequantize(read.__getitem__), part)
            if bits == 4:
                torch.testing.assert_close(multiplied(found, read), part)


def multiplied(packed: Any, read: dict[str, Tensor]) -> Tensor:
    """Return the values of an int4 product's weight."""
    codes = packed.codes(read.__getitem__)
    groups = torch.arange(codes.values.shape[1]) // packed.group
    return (codes.values.float() - codes.zeros[:, groups]) * codes.scales[:, groups]


def made(folder: Path, word: int | None = None, **stated: Any) -> Checkpoint:
    """Make a GPTQ checkpoint in 4 bits with zero points from one word, or random ones."""
    make_published(folder, folder.parent / "plain", "gptq")
    if word is not None:
        stored = load_file(folder / SINGLE)
        for name in stored:
            if name.endswith("qzeros"):
                stored[name].view(torch.uint32).fill_(word)
        save_file(stored, folder / SINGLE, metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config={**PUBLISHED["gptq"].config, **stated})
    return inspect_checkpoint(folder)


def layer(checkpoint: Checkpoint) -> Tensor:
    return CheckpointWeights(checkpoint, torch.float32, "cpu").layer(1)["qkv"]


def fingerprint_before(checkpoint: Checkpoint) -> str:
    """Return the fingerprint of older versions, which trusted the stated layout."""
    return model_fingerprint(read_config_json(checkpoint.path), checkpoint.files, {}, lambda _: None)


def test_zero_points_of_a_symmetric_checkpoint_show_their_layout(tmp_path: Path) -> None:
    """The checkpoint's stated layout is ignored. Answers from the wrong layout are not reused."""
    first = made(tmp_path / "first", 0x77777777, sym=True)
    mislabelled = [
        made(tmp_path / "second", 0x88888888, sym=True),
        made(tmp_path / "first as second", 0x77777777, sym=True, checkpoint_format="gptq_v2"),
    ]
    for each in mislabelled:
        assert torch.equal(layer(each), layer(first))
        assert each.fingerprint({}) != fingerprint_before(each)
        assert any("the zero points are stored as gptq" in notice for notice in each.notices)
    for sound in (first, made(tmp_path / "v2", 0x88888888, sym=True, checkpoint_format="gptq_v2")):
        assert sound.fingerprint({}) == fingerprint_before(sound)
        assert not any("zero points" in notice for notice in sound.notices)
    unknown = made(tmp_path / "asymmetric", 0x88888888)
    assert not torch.equal(layer(unknown), layer(first))


@pytest.mark.parametrize("word", [0x55555555, 0x77787777])
def test_zero_points_that_fit_no_layout_are_refused_before_a_run(tmp_path: Path, word: int) -> None:
    made(tmp_path / "model", word, sym=True)
    make_tokenizer(tmp_path / "model")
    job = load_job(write_job(tmp_path, tmp_path / "model", [{"text": "a"}], **PLAIN), ())
    value = 5 if word == 0x55555555 else 8
    with pytest.raises(
        JobFileError, match=rf"qzeros stores {value}, and .* sym: true; wanted 7 \(gptq\) or 8"
    ) as raised:
        validate_job(job)
    assert "more tensors store zero points that do not fit" in str(raised.value)
    edit_json(tmp_path / "model/config.json", quantization_config={**PUBLISHED["gptq"].config, "sym": False})
    validate_job(job)


def test_modules_may_be_asymmetric_in_a_symmetric_checkpoint(tmp_path: Path) -> None:
    """`dynamic` of GPTQModel. The zero points of such modules reveal nothing."""
    dynamic = {"+:.*down_proj": {"sym": False}}
    checkpoint = made(tmp_path / "model", 0x56565656, sym=True, dynamic=dynamic)
    assert checkpoint.fingerprint({}) == fingerprint_before(checkpoint)


def test_only_answers_that_were_wrong_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zero point of 0 was read as 16. Each checkpoint is scanned once."""
    cache: dict[str, str] = {}
    wrong = made(tmp_path / "zero", 0x7F777777)
    sound = made(tmp_path / "none", 0x7E777777)
    second = made(tmp_path / "second", 0x7F777777, checkpoint_format="gptq_v2")
    found = [each.fingerprint(cache) for each in (wrong, sound, second)]
    assert [each == fingerprint_before(of) for each, of in zip(found, (wrong, sound, second), strict=True)] == [
        False, True, True,
    ]  # fmt: skip
    monkeypatch.setattr(StoredTensor, "content", lambda tensor: pytest.fail("read again"))
    assert [each.fingerprint(cache) for each in (wrong, sound, second)] == found


def test_padding_after_the_outputs_is_ignored() -> None:
    """9 outputs take two words; the second has a single output."""
    symmetric = ZeroLayout(FIRST, FIRST, symmetric=True)
    words = np.array([[0x77777777, 0xFFFFFFF7]], np.uint32)
    assert symmetric.first_wrong_value(words, 4, 9) is None
    assert symmetric.first_wrong_value(words, 4, 10) == 15
    assert not symmetric.is_misread(words, 4, 9)
    assert symmetric.is_misread(words, 4, 10)


@pytest.mark.parametrize(
    ("stated", "text"),
    [
        ({"checkpoint_format": False}, "checkpoint_format is False; wanted one of ('gptq', 'gptq_v2')"),
        ({"checkpoint_format": 0}, "checkpoint_format is 0; wanted"),
        ({"checkpoint_format": ""}, "checkpoint_format is ''; wanted"),
        ({"checkpoint_format": ["gptq"]}, "checkpoint_format is ['gptq']; wanted"),
        ({"sym": 1}, "sym is 1; wanted true or false"),
        ({"desc_act": "true"}, "desc_act is 'true'; wanted true or false"),
    ],
)
def test_settings_of_another_type_are_refused(stated: dict[str, Any], text: str) -> None:
    mistakes: list[str] = []
    assert gptq_format({"bits": 4, **stated}, mistakes) is None
    assert text in mistakes[0]


def test_a_layout_of_null_is_the_first() -> None:
    assert gptq_format({"bits": 4, "checkpoint_format": None}, []) == gptq_format({"bits": 4}, [])
