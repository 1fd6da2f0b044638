"""Tests that weights stored in 4 and 8 bits are dequantised correctly, or rejected with a reason."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchinfer.core.errors import JobFileError, SecurityRefusal
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.files.safetensors_header import read_metadata
from batchinfer.models.spec.parameters import SCALES, ZEROS
from batchinfer_kernels.arithmetic import Quantization
from tests.batchinfer.models.test_logits import check_logits
from tests.checkpoints import edit_json
from tests.packed_weights import SINGLE
from tests.published_formats import PUBLISHED, published

Q = "model.layers.1.self_attn.q_proj."


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_equal_the_dequantised_weights(name: str) -> None:
    folder, model = published(name)
    checkpoint = check_logits(folder / "packed", model, lengths=(1, 17, 60))
    assert len(checkpoint.encoded) >= 7
    assert checkpoint.parameters == inspect_checkpoint(folder / "plain").parameters
    (notice,) = checkpoint.notices
    done = "filled up with zeros" if published_as_floats(name) else "dequantised"
    assert f"are {done} when they are loaded: all weights take" in notice


def published_as_floats(name: str) -> bool:
    return name in ("2:4 sparse", "sparse")


def copied(folder: Path, name: str) -> Path:
    """Copy a checkpoint that a test may change."""
    return Path(shutil.copytree(published(name)[0] / "packed", folder / "packed"))


def refused(folder: Path) -> str:
    with pytest.raises(JobFileError) as raised:
        inspect_checkpoint(folder)
    return str(raised.value)


def missing(end: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(Q + end)


def shorten(end: str) -> Callable[[dict[str, Tensor]], Any]:
    """Return a change that removes the last row of a tensor."""
    return lambda tensors: tensors.update({Q + end: tensors[Q + end][:-1].clone()})


def other(end: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({Q + end: change(tensors[Q + end]).contiguous()})


WRONG: list[tuple[str, Callable[[dict[str, Tensor]], Any], str]] = [
    ("gptq", missing("scales"), f"{Q}qweight is quantised, and its {Q}scales are missing"),
    ("gptq", shorten("qzeros"), f"{Q}qzeros [1, 8] (I32) and"),
    ("gptq", shorten("g_idx"), f"{Q}g_idx [63] (I32) are no weights of gptq and their scales"),
    ("gptq", other("g_idx", lambda t: t + 1), f"{Q}g_idx [64] (I32) are no weights of gptq"),
    ("gptq", other("scales", lambda t: t.int()), f"{Q}scales [2, 64] (I32) and"),
    ("gptq", other("qweight", lambda t: t.float()), f"{Q}qweight [8, 64] (F32) and"),
    ("awq", missing("qzeros"), f"{Q}qweight is quantised, and its {Q}qzeros are missing"),
    ("awq", shorten("scales"), f"{Q}scales [1, 64] (F16) and"),
    ("w4a16", missing("weight_shape"), f"{Q}weight_packed is quantised, and its {Q}weight_shape are missing"),
    ("w4a16", other("weight_shape", lambda t: t * 2), f"{Q}weight_packed [64, 8] (I32) and"),
    ("w4a16", other("weight_shape", lambda t: t - 2**40), f"{Q}weight_packed [64, 8] (I32) and"),
    ("w4a16 with zeros", shorten("weight_zero_point"), f"{Q}weight_zero_point [7, 2] (I32) are no"),
    ("w8a16, actorder", other("weight_g_idx", lambda t: -t), f"{Q}weight_g_idx [64] (I32) are no"),
    ("w8a8", shorten("weight_scale"), f"{Q}weight_scale [63, 1] (F32) are no weights of int8"),
    ("nvfp4", shorten("weight_scale"), f"{Q}weight_scale [63, 4] (F8_E4M3) and"),
    ("nvfp4 of modelopt", other("weight_scale", lambda t: t.float()), f"{Q}weight_scale [64, 4] (F32) and"),
    (
        "mxfp4 of linear layers",
        shorten("weight_scale"),
        f"{Q}weight_scale [63, 2] (U8) are no weights of mxfp4",
    ),
    ("2:4 sparse", missing("bitmask"), f"{Q}compressed is quantised, and its {Q}bitmask are missing"),
    ("2:4 sparse", shorten("bitmask"), f"{Q}bitmask [63, 8] (U8) and"),
    ("2:4 sparse", shorten("compressed"), f"{Q}compressed [63, 32] (BF16) and"),
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
    ("nf4", shorten("weight"), f"{Q}weight [2047, 1] (U8) and"),
    ("nf4", shorten("weight.quant_state.bitsandbytes__nf4"), "wanted the JSON of bitsandbytes"),
    ("nf4, double", shorten("weight.nested_absmax"), f"{Q}weight.nested_absmax [7] (F32) and"),
    (
        "torchao int4",
        missing("_weight_scale"),
        f"{Q}weight is quantised, and its {Q}_weight_scale are missing",
    ),
    ("torchao int4", missing("_weight_zero_point"), f"and its {Q}_weight_zero_point are missing"),
    ("torchao int4", shorten("_weight_scale"), f"{Q}_weight_scale [1, 64] (F16) and"),
    ("torchao int8", shorten("_weight_scale"), f"{Q}_weight_scale [63, 1] (BF16) and"),
    ("torchao intx", other("_weight_qdata", lambda t: t.float()), f"{Q}_weight_qdata [64, 64] (F32) and"),
    ("torchao fp8", shorten("_weight_scale"), f"{Q}_weight_scale [63, 1] (F32) are no weights of fp8"),
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
    file = copied(tmp_path, name) / SINGLE
    stored, header = load_file(file), read_metadata(file)
    change(stored)
    save_file(stored, file, metadata=header)
    assert text in refused(file.parent)


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
            "transform 'R4' is of 'input'; wanted weight_input or weight_output",
        ),
        ("nf4", {"load_in_4bit": False}, "load_in_4bit is False and load_in_8bit False; wanted true"),
        ("nvfp4 of modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'; wanted one of"),
    ],
)  # fmt: skip
def test_settings_that_are_not_read_are_named(tmp_path: Path, name: str, stated: Any, text: str) -> None:
    folder = copied(tmp_path, name)
    edit_json(folder / "config.json", quantization_config={**PUBLISHED[name].config, **stated})
    assert text in refused(folder)


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
    folder, stated = copied(tmp_path, "w4a16"), copy.deepcopy(cast(Any, PUBLISHED["w4a16"].config))
    stated["config_groups"]["group_0"]["weights"].update(weights)
    edit_json(folder / "config.json", quantization_config=stated)
    assert re.search(text, refused(folder))


def test_a_checkpoint_may_have_different_groups(tmp_path: Path) -> None:
    """Attention in 8 bits, the rest in 4."""
    folder, other = copied(tmp_path, "w4a16"), published("w8a8")[0]
    plain = Path(shutil.copytree(published("w4a16")[0] / "plain", tmp_path / "plain"))
    stored, eight = load_file(folder / SINGLE), load_file(other / "packed" / SINGLE)
    of_query = {f"{Q}weight", f"{Q}weight_scale"}
    stored = {name: tensor for name, tensor in stored.items() if not name.startswith(Q)}
    stored |= {name: tensor for name, tensor in eight.items() if name in of_query}
    save_file(stored, folder / SINGLE, metadata={"format": "pt"})
    dequantised = {f"{Q}weight": load_file(other / "plain" / SINGLE)[f"{Q}weight"]}
    save_file(load_file(plain / SINGLE) | dequantised, plain / SINGLE)
    four, by_channel = (PUBLISHED[name].config["config_groups"]["group_0"] for name in ("w4a16", "w8a8"))
    groups = {"group_0": four, "group_1": {**by_channel, "targets": ["re:.*q_proj"]}}
    stated = {**PUBLISHED["w4a16"].config, "format": "mixed-precision", "config_groups": groups}
    edit_json(folder / "config.json", quantization_config=stated)
    assert {each.format for each in inspect_checkpoint(folder).encoded.values()} == {"pack-quantized", "int8"}
    assert torch.equal(read(folder)["qkv"], read(plain)["qkv"])


def read(folder: Path, quantization: Quantization = "none") -> Mapping[str, Tensor]:
    checkpoint = inspect_checkpoint(folder).for_quantization(quantization)
    return CheckpointWeights(checkpoint, torch.float32, "cpu").layer(1)


OLD = {"gptq": "quantize_config.json", "awq": "quant_config.json"}
AWQ_KEYS = {"bits": "w_bit", "group_size": "q_group_size", "zero_point": "zero_point", "version": "version"}


def make_old(folder: Path, name: str, **stated: Any) -> None:
    """Make a checkpoint of 2023, whose quantisation is described in its own file."""
    copied(folder, name)
    config = dict(PUBLISHED[name].config)
    del config["quant_method"]
    if name == "awq":
        config = {theirs: config[ours] for ours, theirs in AWQ_KEYS.items()}
    edit_json(folder / "packed/config.json", quantization_config=...)
    (folder / "packed" / OLD[name]).write_text(json.dumps({**config, **stated}))


@pytest.mark.parametrize("name", OLD)
def test_old_checkpoints_state_their_format_in_a_file_of_its_own(tmp_path: Path, name: str) -> None:
    make_old(tmp_path, name)
    found = check_logits(tmp_path / "packed", published(name)[1], lengths=(1, 17))
    assert {each.format for each in found.encoded.values()} == {name}
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
    assert text in refused(tmp_path / "packed")


def test_config_json_has_priority(tmp_path: Path) -> None:
    folder = copied(tmp_path, "gptq")
    before = inspect_checkpoint(folder).fingerprint({})
    (folder / "quantize_config.json").write_text('{"bits": 3}')
    assert inspect_checkpoint(folder).fingerprint({}) == before


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            {"_type": "Int4TilePackedTo4dTensor"},
            "is a 'Int4TilePackedTo4dTensor' of torchao; Float8Tensor, Int8",
        ),
        ({"_type": ["Int8Tensor"]}, "is a ['Int8Tensor'] of torchao"),
        (None, f"{Q}_weight_qdata is quantised, but the header does not describe {Q}weight"),
    ],
)
def test_classes_of_torchao_that_are_not_read_are_named(tmp_path: Path, said: Any, text: str) -> None:
    file = copied(tmp_path, "torchao int8") / SINGLE
    stored, header = load_file(file), read_metadata(file)
    del header[f"{Q}weight"]
    if said is not None:
        header[f"{Q}weight"] = json.dumps(said)
    save_file(stored, file, metadata=header)
    told = refused(file.parent)
    assert text in told
    assert "unexpected tensors" not in told


def test_int8_of_torchao_is_multiplied_if_activations_are_quantised() -> None:
    for name, kept in (("torchao w8a8", "stored-int8"), ("torchao int8", "none")):
        assert inspect_checkpoint(published(name)[0] / "packed").stored_quantization == kept


@pytest.mark.parametrize("name", ["torchao int4", "torchao intx"])
def test_quantised_values_of_torchao_are_the_weights(name: str) -> None:
    folder = published(name)[0]
    assert {
        form.codes for form in inspect_checkpoint(folder / "packed").for_quantization("int4").spec.forms
    } == {"int4"}
    found, plain = read(folder / "packed", "int4"), read(folder / "plain")
    for part in ("qkv", "gate_up", "down"):
        scales, zeros = (found[part + end].repeat_interleave(32, 1) for end in (SCALES, ZEROS))
        torch.testing.assert_close((found[part].float() - zeros) * scales, plain[part], atol=1e-5, rtol=1e-5)
