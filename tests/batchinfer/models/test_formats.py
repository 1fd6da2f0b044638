"""Weights that are stored in 4 and 8 bits are read as the numbers that they stand for, or refused with the reason."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchinfer.core.errors import JobFileError, SecurityRefusal
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.files.safetensors_header import read_metadata
from batchinfer.models.spec.parameters import SCALES, ZEROS
from tests.batchinfer.models.test_logits import check_logits
from tests.checkpoints import edit_json
from tests.packed_weights import SINGLE
from tests.published_formats import PUBLISHED, make_published

Q = "model.layers.1.self_attn.q_proj."


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_are_those_of_the_dequantised_weights(tmp_path: Path, name: str) -> None:
    model = make_published(tmp_path / "packed", tmp_path / "plain", name)
    checkpoint = check_logits(tmp_path / "packed", model, lengths=(1, 17, 60))
    assert len(checkpoint.packed) >= 7
    assert checkpoint.parameters == inspect_checkpoint(tmp_path / "plain").parameters
    (notice,) = checkpoint.notices
    done = "filled up with zeros" if published_as_floats(name) else "dequantised"
    assert f"are {done} when they are loaded: all weights take" in notice


def published_as_floats(name: str) -> bool:
    return name in ("2:4 sparse", "sparse")


def missing(end: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(Q + end)


def cut(end: str) -> Callable[[dict[str, Tensor]], Any]:
    """The last line of a tensor is not there."""
    return lambda tensors: tensors.update({Q + end: tensors[Q + end][:-1].clone()})


def other(end: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({Q + end: change(tensors[Q + end]).contiguous()})


WRONG: list[tuple[str, Callable[[dict[str, Tensor]], Any], str]] = [
    ("gptq", missing("scales"), f"{Q}qweight is quantised, and its {Q}scales are missing"),
    ("gptq", cut("qzeros"), f"{Q}qzeros [1, 8] (I32) and"),
    ("gptq", cut("g_idx"), f"{Q}g_idx [63] (I32) are no weights of gptq and their scales"),
    ("gptq", other("g_idx", lambda t: t + 1), f"{Q}g_idx [64] (I32) are no weights of gptq"),
    ("gptq", other("scales", lambda t: t.int()), f"{Q}scales [2, 64] (I32) and"),
    ("gptq", other("qweight", lambda t: t.float()), f"{Q}qweight [8, 64] (F32) and"),
    ("awq", missing("qzeros"), f"{Q}qweight is quantised, and its {Q}qzeros are missing"),
    ("awq", cut("scales"), f"{Q}scales [1, 64] (F16) and"),
    ("w4a16", missing("weight_shape"), f"{Q}weight_packed is quantised, and its {Q}weight_shape are missing"),
    ("w4a16", other("weight_shape", lambda t: t * 2), f"{Q}weight_packed [64, 8] (I32) and"),
    ("w4a16", other("weight_shape", lambda t: t - 2**40), f"{Q}weight_packed [64, 8] (I32) and"),
    ("w4a16 with zeros", cut("weight_zero_point"), f"{Q}weight_zero_point [7, 2] (I32) are no"),
    ("w8a16, actorder", other("weight_g_idx", lambda t: -t), f"{Q}weight_g_idx [64] (I32) are no"),
    ("w8a8", cut("weight_scale"), f"{Q}weight_scale [63, 1] (F32) are no weights of int8"),
    ("nvfp4", cut("weight_scale"), f"{Q}weight_scale [63, 4] (F8_E4M3) and"),
    ("nvfp4 of modelopt", other("weight_scale", lambda t: t.float()), f"{Q}weight_scale [64, 4] (F32) and"),
    ("mxfp4 of linear layers", cut("weight_scale"), f"{Q}weight_scale [63, 2] (U8) are no weights of mxfp4"),
    ("2:4 sparse", missing("bitmask"), f"{Q}compressed is quantised, and its {Q}bitmask are missing"),
    ("2:4 sparse", cut("bitmask"), f"{Q}bitmask [63, 8] (U8) and"),
    ("2:4 sparse", cut("compressed"), f"{Q}compressed [63, 32] (BF16) and"),
    (
        "2:4 sparse",
        other("shape", lambda t: t * 2),
        f"{Q}shape [2, 1] (I64) are no weights of sparse weights",
    ),
    ("2:4 sparse", other("shape", lambda t: -t), f"{Q}compressed [64, 32] (BF16) and"),
    ("sparse", missing("shape"), f"{Q}compressed is quantised, and its {Q}shape are missing"),
    (
        "2:4 sparse fp8",
        missing("weight_scale"),
        f"{Q}weight is FP8, and its scales {Q}weight_scale_inv are missing",
    ),
    ("nf4", missing("weight.absmax"), f"and its {Q}weight.absmax are missing"),
    ("nf4", cut("weight"), f"{Q}weight [2047, 1] (U8) and"),
    ("nf4", cut("weight.quant_state.bitsandbytes__nf4"), "wanted the JSON of bitsandbytes"),
    ("nf4, double", cut("weight.nested_absmax"), f"{Q}weight.nested_absmax [7] (F32) and"),
    (
        "torchao int4",
        missing("_weight_scale"),
        f"{Q}weight is quantised, and its {Q}_weight_scale are missing",
    ),
    ("torchao int4", missing("_weight_zero_point"), f"and its {Q}_weight_zero_point are missing"),
    ("torchao int4", cut("_weight_scale"), f"{Q}_weight_scale [1, 64] (F16) and"),
    ("torchao int8", cut("_weight_scale"), f"{Q}_weight_scale [63, 1] (BF16) and"),
    ("torchao intx", other("_weight_qdata", lambda t: t.float()), f"{Q}_weight_qdata [64, 64] (F32) and"),
    ("torchao fp8", cut("_weight_scale"), f"{Q}_weight_scale [63, 1] (F32) are no weights of fp8"),
    (
        "torchao int8",
        lambda tensors: tensors.update({f"{Q}_weight_act_pre_scale": torch.ones(64)}),
        f"{Q}weight has {Q}_weight_act_pre_scale, by which inputs are multiplied; that is not read",
    ),
    ("int8 of bitsandbytes", missing("SCB"), f"{Q}weight is quantised, and its {Q}SCB are missing"),
    ("int8 of bitsandbytes", other("weight_format", lambda t: t + 1), "no weights of bitsandbytes of 8 bits"),
]


@pytest.mark.parametrize(("name", "change", "text"), WRONG)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, name: str, change: Callable[[dict[str, Tensor]], Any], text: str
) -> None:
    make_published(tmp_path / "packed", tmp_path / "plain", name)
    stored = load_file(tmp_path / "packed" / SINGLE)
    header = read_metadata(tmp_path / "packed" / SINGLE)
    change(stored)
    save_file(stored, tmp_path / "packed" / SINGLE, metadata=header)
    with pytest.raises(JobFileError) as raised:
        inspect_checkpoint(tmp_path / "packed")
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("name", "stated", "text"),
    [
        ("gptq", {"bits": 3}, "bits is 3; wanted one of (2, 4, 8)"),
        ("gptq", {"bits": [4]}, "bits is [4]; wanted one of"),
        ("gptq", {"group_size": 0}, "group_size is 0; wanted a number above 0, or -1"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; wanted one of"),
        ("gptq", {"pack_dtype": "int64"}, "pack_dtype is 'int64'; wanted 'int32'"),
        ("gptq", {"quant_method": "aqlm"}, "quant_method 'aqlm' are not supported; float weights and mxfp4"),
        ("gptq", {"quant_method": ["gptq"]}, "are not supported"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; wanted 'gemm'"),
        ("awq", {"bits": 3}, "bits is 3; wanted 4"),
        ("w4a16", {"format": "marlin-24"}, "format is 'marlin-24': its words are in the order of one GPU kernel"),
        ("2:4 sparse", {"sparsity_config": {"format": "sparse-48"}}, "format is 'sparse-48'; wanted one of"),
        (
            "w4a16",
            {"transform_config": {"config_groups": {"R4": {"apply": [{"location": "input", "targets": ["Linear"]}]}}}},
            "transform 'R4' is of 'input'; wanted only those that are in the weights",
        ),
        ("nf4", {"load_in_4bit": False}, "load_in_4bit is False and load_in_8bit False; wanted one"),
        ("nvfp4 of modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; wanted one of"),
    ],
)  # fmt: skip
def test_settings_that_are_not_read_are_named(tmp_path: Path, name: str, stated: Any, text: str) -> None:
    make_published(tmp_path / "packed", tmp_path / "plain", name)
    edit_json(tmp_path / "packed" / "config.json", quantization_config={**PUBLISHED[name].config, **stated})
    with pytest.raises(JobFileError) as raised:
        inspect_checkpoint(tmp_path / "packed")
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"num_bits": 3}, "num_bits.*3.*; wanted 8-bit float by tensor, channel, block"),
        ({"num_bits": [4]}, "wanted 8-bit float"),
        ({"type": "float", "symmetric": False}, "symmetric"),
        ({"type": "float", "group_size": 64}, "group_size of group_0 is 64; wanted 32 for floats"),
    ],
)
def test_groups_that_are_not_read_are_named(tmp_path: Path, weights: Any, text: str) -> None:
    make_published(tmp_path / "packed", tmp_path / "plain", "w4a16")
    stated: Any = copy.deepcopy(PUBLISHED["w4a16"].config)
    stated["config_groups"]["group_0"]["weights"].update(weights)
    edit_json(tmp_path / "packed" / "config.json", quantization_config=stated)
    with pytest.raises(JobFileError, match=text):
        inspect_checkpoint(tmp_path / "packed")


def test_one_checkpoint_may_have_groups_of_several_kinds(tmp_path: Path) -> None:
    """Attention in 8 bits, the rest in 4."""
    make_published(tmp_path / "packed", tmp_path / "plain", "w4a16")
    make_published(tmp_path / "other", tmp_path / "plain of it", "w8a8")
    stored, eight = (load_file(tmp_path / folder / SINGLE) for folder in ("packed", "other"))
    plain, eight_plain = (load_file(tmp_path / folder / SINGLE) for folder in ("plain", "plain of it"))
    for name in [name for name in stored if name.startswith(Q)]:
        del stored[name]
    stored |= {name: tensor for name, tensor in eight.items() if name in (f"{Q}weight", f"{Q}weight_scale")}
    save_file(stored, tmp_path / "packed" / SINGLE, metadata={"format": "pt"})
    save_file(plain | {f"{Q}weight": eight_plain[f"{Q}weight"]}, tmp_path / "plain" / SINGLE)
    four, by_channel = (PUBLISHED[name].config["config_groups"]["group_0"] for name in ("w4a16", "w8a8"))
    stated = {**PUBLISHED["w4a16"].config, "format": "mixed-precision"}
    stated["config_groups"] = {"group_0": four, "group_1": {**by_channel, "targets": ["re:.*q_proj"]}}
    edit_json(tmp_path / "packed" / "config.json", quantization_config=stated)
    found = inspect_checkpoint(tmp_path / "packed")
    assert {each.format for each in found.packed.values()} == {"pack-quantized", "int8"}
    assert torch.equal(read(tmp_path / "packed"), read(tmp_path / "plain"))


def read(folder: Path) -> Tensor:
    from batchinfer.models.checkpoint.weights import CheckpointWeights

    return CheckpointWeights(inspect_checkpoint(folder), torch.float32, "cpu").layer(1)["qkv"]


OLD = {"gptq": "quantize_config.json", "awq": "quant_config.json"}
AWQ_KEYS = {"bits": "w_bit", "group_size": "q_group_size", "zero_point": "zero_point", "version": "version"}


def make_old(folder: Path, name: str, **stated: Any) -> Any:
    """A checkpoint of 2023: what it states of its quantisation is in a file of its own."""
    model = make_published(folder / "packed", folder / "plain", name)
    config = dict(PUBLISHED[name].config)
    del config["quant_method"]
    if name == "awq":
        config = {theirs: config[ours] for ours, theirs in AWQ_KEYS.items()}
    edit_json(folder / "packed/config.json", quantization_config=...)
    (folder / "packed" / OLD[name]).write_text(json.dumps({**config, **stated}))
    return model


@pytest.mark.parametrize("name", OLD)
def test_old_checkpoints_state_their_format_in_a_file_of_its_own(tmp_path: Path, name: str) -> None:
    found = check_logits(tmp_path / "packed", make_old(tmp_path, name), lengths=(1, 17))
    assert {each.format for each in found.packed.values()} == {name}
    file = tmp_path / "packed" / OLD[name]
    before = found.fingerprint({})
    edit_json(file, damp_percent=0.5)
    assert inspect_checkpoint(tmp_path / "packed").fingerprint({}) != before
    file.unlink()
    file.mkdir()
    with pytest.raises(SecurityRefusal, match="not a regular file"):
        inspect_checkpoint(tmp_path / "packed")


@pytest.mark.parametrize(
    ("name", "stated", "text"),
    [
        ("gptq", {"bits": 3}, "quantize_config.json: bits is 3; wanted one of (2, 4, 8)"),
        ("gptq", {"is_marlin_format": True}, "quantize_config.json: checkpoint_format is 'marlin'; wanted"),
        ("awq", {"w_bit": 3}, "quant_config.json: bits is 3; wanted 4"),
        ("awq", {"version": "GEMV"}, "quant_config.json: version is 'GEMV'; wanted 'gemm'"),
    ],
)
def test_old_settings_that_are_not_read_are_named(tmp_path: Path, name: str, stated: Any, text: str) -> None:
    make_old(tmp_path, name, **stated)
    with pytest.raises(JobFileError, match=re.escape(text)):
        inspect_checkpoint(tmp_path / "packed")


def test_what_config_json_states_is_preferred(tmp_path: Path) -> None:
    make_published(tmp_path / "packed", tmp_path / "plain", "gptq")
    before = inspect_checkpoint(tmp_path / "packed").fingerprint({})
    (tmp_path / "packed/quantize_config.json").write_text('{"bits": 3}')
    assert inspect_checkpoint(tmp_path / "packed").fingerprint({}) == before


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            {"_type": "Int4TilePackedTo4dTensor"},
            "is a 'Int4TilePackedTo4dTensor' of torchao; Float8Tensor, Int8",
        ),
        ({"_type": ["Int8Tensor"]}, "is a ['Int8Tensor'] of torchao"),
        (None, f"{Q}_weight_qdata is quantised, and the header says nothing of {Q}weight"),
    ],
)
def test_classes_of_torchao_that_are_not_read_are_named(tmp_path: Path, said: Any, text: str) -> None:
    make_published(tmp_path / "packed", tmp_path / "plain", "torchao int8")
    file = tmp_path / "packed" / SINGLE
    stored, header = load_file(file), read_metadata(file)
    del header[f"{Q}weight"]
    if said is not None:
        header[f"{Q}weight"] = json.dumps(said)
    save_file(stored, file, metadata=header)
    with pytest.raises(JobFileError, match=re.escape(text)) as raised:
        inspect_checkpoint(tmp_path / "packed")
    assert "unexpected tensors" not in str(raised.value)


def test_int8_of_torchao_is_multiplied_where_activations_are_quantised_too(tmp_path: Path) -> None:
    for name, kept in (("torchao w8a8", "stored-int8"), ("torchao int8", "none")):
        make_published(tmp_path / name, tmp_path / "plain", name)
        assert inspect_checkpoint(tmp_path / name).stored_quantization == kept


def test_codes_of_torchao_are_the_weights(tmp_path: Path) -> None:
    for name, codes in (("torchao int4", "int4"), ("torchao intx", "int4")):
        make_published(tmp_path / name, tmp_path / "plain", name)
        checkpoint = inspect_checkpoint(tmp_path / name).held_for("int4")
        found = CheckpointWeights(checkpoint, torch.float32, "cpu").layer(1)
        plain = CheckpointWeights(inspect_checkpoint(tmp_path / "plain"), torch.float32, "cpu").layer(1)
        assert {form.codes for form in checkpoint.spec.forms} == {codes}
        for part in ("qkv", "gate_up", "down"):
            scales, zeros = (found[part + end].repeat_interleave(32, 1) for end in (SCALES, ZEROS))
            values = (found[part].float() - zeros) * scales
            torch.testing.assert_close(values, plain[part], atol=1e-5, rtol=1e-5)
