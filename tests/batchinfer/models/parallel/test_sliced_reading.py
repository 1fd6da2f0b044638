"""Tests that a rank reads exactly its part of a checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from batchinfer.core.errors import CannotSplit
from batchinfer.models.checkpoint import weights as weights_module
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.checkpoint.file_segment import FileSegment
from batchinfer.models.checkpoint.read_ahead import ReadAhead
from batchinfer.models.checkpoint.stored_parts import StoredParts, check_parts
from batchinfer.models.checkpoint.weights import CheckpointWeights, LayerWeights, ReadCount
from batchinfer.models.formats.encoded_tensor import slice_inputs
from batchinfer.models.formats.mxfp4 import mxfp4_values
from batchinfer.models.parallel.shard import ModelShard, Portion
from batchinfer.models.parallel.shard_spec import shard_spec
from batchinfer.models.spec.parameters import LINES, SCALES, ZEROS, parameter_count
from batchinfer.models.spec.spec import LinearSpec
from batchinfer_kernels.arithmetic import STORED
from tests.checkpoints import make_checkpoint
from tests.packed_weights import make_fp8, make_mxfp4
from tests.published_formats import PUBLISHED, SIZES, make_published


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_slice_keeps_groups_and_words_whole(group: int, held: int, units: int, data: st.DataObject) -> None:
    """A slice that ends within a group of several inputs, or within a word, is rejected."""
    count = group * held * units
    first, end = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    one = units * held == 1
    whole = (first, end) == (0, count)
    divided = any(at % held or (at % group and not one) for at in (first, end))
    if divided and not whole:
        with pytest.raises(CannotSplit):
            slice_inputs((first, end), count, group, held)
        return
    sliced = slice_inputs((first, end), count, group, held)
    assert sliced.group == (end - first if one else group)
    scales, words = [*range(count // group)][sliced.groups], [*range(count // held)][sliced.words]
    for number, at in enumerate(range(first, end)):
        assert scales[number // sliced.group] == at // group
        assert words[number // held] == at // held


class CountedFile:
    """A safetensors file that counts the bytes read."""

    read: ClassVar[Counter[str]] = Counter()

    def __init__(self, *place: Any, **how: Any) -> None:
        self._file = safe_open(*place, **how)

    def __enter__(self) -> CountedFile:
        self._file.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._file.__exit__(*details)

    def get_tensor(self, name: str) -> Tensor:
        return self._noted(name, self._file.get_tensor(name))

    def get_slice(self, name: str) -> CountedSlice:
        return CountedSlice(self, name, self._file.get_slice(name))

    def _noted(self, name: str, found: Tensor) -> Tensor:
        self.read[name] += found.nbytes
        return found


class CountedSlice:
    def __init__(self, file: CountedFile, name: str, inner: Any) -> None:
        self._file, self._name, self._inner = file, name, inner

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        return self._file._noted(self._name, self._inner[part])


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    monkeypatch.setattr(CountedFile, "read", Counter())
    monkeypatch.setattr(weights_module, "safe_open", CountedFile)
    read_segment = FileSegment.read

    def counted(segment: FileSegment, *given: Any) -> None:
        CountedFile.read[f"{segment.file.name} from {segment.start}"] += segment.shape[0] * segment.line_bytes
        read_segment(segment, *given)

    monkeypatch.setattr(FileSegment, "read", counted)
    return CountedFile.read


def read_all(checkpoint: Checkpoint, place: ModelShard) -> int:
    """Read a rank's part and return the number of bytes by its own count."""
    count = ReadCount()
    weights = CheckpointWeights(checkpoint, torch.float32, "cpu", place, count)
    weights.tables()
    for index in range(len(shard_spec(checkpoint.spec, place).layers)):
        weights.layer(index)
    return count.bytes


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gpt_neox", "gemma2", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("experts", [False, True])
def test_a_rank_reads_its_parameters_and_nothing_else(
    tmp_path: Path, family: str, experts: bool, read: Counter[str]
) -> None:
    make_checkpoint(tmp_path, family, num_key_value_heads=4)
    checkpoint = inspect_checkpoint(tmp_path)
    if experts and family not in ("mixtral", "gpt_oss"):
        return
    for rank in range(4):
        share = Portion(rank, 4)
        place = ModelShard(share, share if experts else None)
        read.clear()
        assert read_all(checkpoint, place) == sum(read.values())
        assert sum(read.values()) <= 4 * parameter_count(shard_spec(checkpoint.spec, place))
        if not rank:
            assert sum(read.values()) == 4 * parameter_count(shard_spec(checkpoint.spec, place))


def test_read_ahead_stays_within_the_read_ranges(tmp_path: Path) -> None:
    """Rows of tensors are read ahead; a part of each row is not."""
    make_checkpoint(tmp_path, "llama", num_key_value_heads=4)
    checkpoint = inspect_checkpoint(tmp_path)
    parts = StoredParts(checkpoint, ModelShard(Portion(1, 4)))
    found = {(each.start, each.end) for each in ReadAhead(checkpoint, parts).ranges(1)}
    stored = checkpoint.tensors
    names = ("q_proj", "k_proj", "v_proj")
    whole = {name: stored[f"model.layers.1.self_attn.{name}.weight"].info for name in names}
    ahead = sum(end - start for start, end in found)
    norms = 2 * 48 * 4
    gate = stored["model.layers.1.mlp.gate_proj.weight"].info.nbytes
    assert ahead == sum(info.nbytes for info in whole.values()) // 4 + 2 * gate // 4 + norms


# Formats whose stored tensors are always read as a whole
REFUSED = (
    "gptq of 8 bits, desc_act, v2", "w8a16, actorder", "nvfp4", "nvfp4 of modelopt", "2:4 sparse", "sparse",
    "2:4 sparse fp8", "nf4", "nf4, double", "fp4", "torchao int4", "torchao intx", "int8 of bitsandbytes",
)  # fmt: skip
FP8 = {"fp8 of blocks": "block", "fp8 of rows": "row", "fp8 of tensors": "tensor"}
FORMS = ("mxfp4", *FP8, *PUBLISHED)


def store(folder: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Checkpoint, Checkpoint]:
    """Return a stored checkpoint and its copy in floats."""
    packed, plain = folder / "packed", folder / "plain"
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 128}
    if form == "mxfp4":
        make_mxfp4(packed, plain, intermediate_size=64)
    elif form in FP8:
        make_fp8(packed, plain, "llama", FP8[form], block=128, num_key_value_heads=2, **sizes)
    else:
        monkeypatch.setitem(cast(dict[str, Any], SIZES), "intermediate_size", 128)
        if form == "awq":
            monkeypatch.setitem(cast(dict[str, Any], PUBLISHED[form].sizes), "moe_intermediate_size", 64)
        make_published(packed, plain, form)
    return inspect_checkpoint(packed), inspect_checkpoint(plain)


def values(weights: LayerWeights, linear: LinearSpec) -> Tensor:
    """Return the dequantised values of a product's weight."""
    weight, scales = weights[linear.name], weights.get(linear.name + SCALES)
    if scales is None or linear.form is None:
        return weight
    if linear.form.codes == "mxfp4":
        return mxfp4_values(weight.view(len(weight), -1, 16), scales)
    wide, group = weight.float(), linear.form.group
    if group:
        zeros = weights.get(linear.name + ZEROS, torch.zeros_like(scales))
        return (wide - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)
    if linear.form.scales == "block":
        scales = scales[weights[linear.name + LINES].long()].repeat_interleave(128, 1)
        return wide * scales[:, : wide.shape[1]]
    return wide * scales[:, None]


@pytest.mark.sample(9)
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_a_stored_format_is_that_part_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, held: bool, read: Counter[str]
) -> None:
    """Dequantised, and as quantised values."""
    packed, plain = store(tmp_path, form, monkeypatch)
    packed = packed.keep_quantized(frozenset(STORED)) if held else packed
    if form in REFUSED:
        with pytest.raises(CannotSplit):
            check_parts(packed, ModelShard(Portion(0, 2)))
        return
    whole = Counter[str]()
    for rank in range(2):
        place = ModelShard(Portion(rank, 2))
        check_parts(packed, place)
        spec = shard_spec(packed.spec, place)
        for index, layer in enumerate(spec.layers):
            wanted = CheckpointWeights(plain, torch.float32, "cpu", place).layer(index)
            read.clear()
            found = CheckpointWeights(packed, torch.float32, "cpu", place).layer(index)
            whole += read
            for linear in layer.linears:
                torch.testing.assert_close(values(found, linear), wanted[linear.name], rtol=1e-6, atol=1e-6)
    for each in packed.encoded.values():
        values_of = each.stored[0]  # read once; scales may be read twice
        assert whole[values_of] == packed.tensors[values_of].info.nbytes


def test_a_group_that_crosses_a_border_is_rejected_with_possible_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 of 96 inputs are no multiple of a group of 32."""
    make_published(tmp_path / "packed", tmp_path / "plain", "w4a16")
    packed = inspect_checkpoint(tmp_path / "packed")
    with pytest.raises(CannotSplit, match="0 to 48 of its inputs are no whole groups of 32"):
        check_parts(packed, ModelShard(Portion(0, 2)))
    with pytest.raises(CannotSplit, match=r"48 of 96 inputs of down .*among 1$"):
        shard_spec(packed.keep_quantized(frozenset(STORED)).spec, ModelShard(Portion(0, 2)))
