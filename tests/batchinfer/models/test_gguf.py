"""Tests that models in GGUF have the logits of their dequantised weights, or are rejected with a reason."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from batchinfer.core.errors import JobFileError
from batchinfer.core.gguf.header import TYPES, read_header
from batchinfer.input.tokenizer.gguf_tokenizer import BYTES, PIECES, SPLIT_RULES
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.checkpoint.weights import CheckpointWeights
from batchinfer.models.gguf.architectures import ARCHITECTURES
from batchinfer.models.opening import open_checkpoint
from batchinfer.models.spec.parameters import SCALES, ZEROS
from tests.batchinfer.models.test_logits import check_logits
from tests.checkpoints import ROPES, kept_folder
from tests.examples import examples
from tests.gguf_files import ARCHS, make_gguf

MIXED = (Type.Q4_0, Type.Q8_0, Type.F32, Type.Q6_K, Type.Q4_K)
KINDS = (
    *(Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0),
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS),
    Type.MXFP4,
)
SMALL = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}  # where no type has blocks of 256


@pytest.mark.parametrize("family", ARCHS)
def test_logits_of_every_architecture(tmp_path: Path, family: str) -> None:
    model = make_gguf(tmp_path / "x.gguf", tmp_path / "plain", family, MIXED)
    checkpoint = check_logits(tmp_path / "x.gguf", model, lengths=(1, 17, 60))
    assert checkpoint.parameters == inspect_checkpoint(tmp_path / "plain").parameters
    (notice,) = checkpoint.notices
    assert notice.startswith(
        "weights stored as Q4_0 and Q4_K and Q6_K and Q8_0 are dequantised when they are"
    )


@pytest.mark.parametrize("first", range(3))
def test_logits_of_every_type(tmp_path: Path, first: int) -> None:
    """Each tensor of a model has one of five types: a misread type changes the logits."""
    model = make_gguf(tmp_path / "x.gguf", tmp_path / "plain", "llama", KINDS[first::3])
    check_logits(tmp_path / "x.gguf", model, lengths=(1, 17, 60))


@pytest.mark.parametrize("rope", ["linear", "yarn"])
def test_scaled_rotations(tmp_path: Path, rope: str) -> None:
    model = make_gguf(tmp_path / "x.gguf", tmp_path / "plain", "qwen2", rope=rope, **SMALL)
    check_logits(tmp_path / "x.gguf", model, lengths=(17, 100))


def test_experts_in_one_tensor_are_read_from_several(tmp_path: Path) -> None:
    """As in gpt-oss, whose YaRN ramp is not rounded to whole dimensions."""
    rope = {**ROPES["yarn"], "truncate": False}
    model = make_gguf(
        tmp_path / "x.gguf", tmp_path / "plain", "gpt_oss", (Type.MXFP4, Type.Q8_0, Type.F16), rope=rope
    )
    found = check_logits(tmp_path / "x.gguf", model, lengths=(17, 100))
    assert found.parameters == inspect(tmp_path / "plain").parameters
    content = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "y.gguf").write_bytes(content.replace(b"ffn_up_exps.bias", b"ffn_up_exps.bios"))
    with pytest.raises(JobFileError, match=r"missing tensors: model.layers.0.mlp.experts.gate_up_proj_bias"):
        open_checkpoint(tmp_path / "y.gguf")


def test_rotations_of_llama_3_are_stored_as_a_tensor(tmp_path: Path) -> None:
    """llama.cpp stores the divisors of the frequencies; transformers computes them from the configuration."""
    rope = ROPES["llama3"]
    config = LlamaConfig(head_dim=64, hidden_size=256, rope_parameters=rope, max_position_embeddings=512)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = rope["rope_theta"] ** -(torch.arange(0, 64, 2).double() / 64)
    factors = (plain / frequencies.double()).tolist()
    assert [min(factors), max(factors)] == pytest.approx([1, 8])
    model = make_gguf(
        tmp_path / "x.gguf",
        tmp_path / "plain",
        "llama",
        rope="llama3",
        factors={"rope_freqs.weight": factors},
    )
    checkpoint = check_logits(tmp_path / "x.gguf", model, lengths=(17, 100))
    assert checkpoint.spec.content_roots(512).is_single


@pytest.mark.parametrize("beyond", [False, True])
def test_long_rotations(tmp_path: Path, beyond: bool) -> None:
    """For a row that may exceed the original context, in a model whose rows all may."""
    rng = torch.Generator().manual_seed(3)
    short, long = (1 + torch.rand(2, 32, generator=rng)).float().tolist()
    original = 40 if beyond else 512
    attention = 1.25
    rope = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": short, "long_factor": long,
        "original_max_position_embeddings": original, "attention_factor": attention,
    }  # fmt: skip
    model = make_gguf(
        tmp_path / "x.gguf",
        tmp_path / "plain",
        "phi3",
        (Type.Q8_0,),
        rope=rope,
        original_max_position_embeddings=original,
        metadata={"rope.scaling.attn_factor": attention},
        factors={"rope_factors_short.weight": short, "rope_factors_long.weight": long},
    )
    found, plain = (inspect(tmp_path / name) for name in ("x.gguf", "plain"))
    assert found.spec.layers[0].attention == plain.spec.layers[0].attention
    if not beyond:
        check_logits(tmp_path / "x.gguf", model, lengths=(17, 100))


def test_the_parts_of_a_model_are_read_together(tmp_path: Path) -> None:
    model = make_gguf(tmp_path / "x.gguf", tmp_path / "plain", "llama", MIXED, shards=3)
    files = sorted(tmp_path.glob("*.gguf"))
    assert [file.name for file in files] == [f"x-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    checkpoint = check_logits(tmp_path, model, lengths=(17,))
    assert checkpoint.files == tuple(files)
    assert open_checkpoint(files[1]).fingerprint({}) == checkpoint.fingerprint({})
    files[2].unlink()
    with pytest.raises(JobFileError, match=r"one of 3 files of a model, and x-00003-of-00003\.gguf missing"):
        open_checkpoint(files[0])


def test_the_fingerprint_covers_the_whole_file(tmp_path: Path) -> None:
    for name, base in (("a", 10_000.0), ("b", 10_000.0), ("c", 20_000.0)):
        make_gguf(
            tmp_path / f"{name}.gguf", tmp_path / "plain", "llama", metadata={"rope.freq_base": base}, **SMALL
        )
    first, same, other = (open_checkpoint(tmp_path / f"{name}.gguf").fingerprint({}) for name in "abc")
    assert first == same != other


def test_4_bit_values_are_multiplied_as_they_are_stored(tmp_path: Path) -> None:
    """In Q4_1 and Q4_K, a group whose scale is 0 only has an offset."""
    for kind in (Type.Q4_0, Type.Q4_1, Type.Q4_K):
        file = tmp_path / f"{kind.name}.gguf"
        make_gguf(file, tmp_path / "plain", "llama", (kind,))
        _zero_scales(file)
        checkpoint = inspect(file).for_quantization("int4")
        assert {name for name, _ in checkpoint.spec.layers[0].forms} == {"qkv", "o", "gate_up", "down"}
        assert {form.whole_zeros for form in checkpoint.spec.forms} == {kind is Type.Q4_0}
        floats = CheckpointWeights(inspect(file), torch.float32, "cpu").layer(0)
        coded = CheckpointWeights(checkpoint, torch.float32, "cpu").layer(0)
        for name in ("qkv", "o", "gate_up", "down"):
            codes, scales = coded[name].float(), coded[name + SCALES].repeat_interleave(32, 1)
            zeros = coded.get(name + ZEROS)
            values = (codes - (0 if zeros is None else zeros.repeat_interleave(32, 1))) * scales
            torch.testing.assert_close(values, floats[name], atol=1e-6, rtol=1e-5)


def inspect(file: Path) -> Checkpoint:
    found = open_checkpoint(file)
    assert isinstance(found, Checkpoint)
    return found


def _zero_scales(file: Path) -> None:
    """Set some scales to 0: in the first block of each matrix of blocks, and in two groups of a K block."""
    content = bytearray(file.read_bytes())
    for tensor in read_header(file).tensors.values():
        if tensor.type.name == "Q4_1":
            content[tensor.start : tensor.start + 2] = bytes(2)
        elif tensor.type.name == "Q4_K":
            content[tensor.start + 4 : tensor.start + 6] = bytes(2)
    file.write_bytes(content)


@cache
def content_of(kind: Type) -> bytes:
    """Return a Llama whose matrices have one type."""
    folder = kept_folder()
    make_gguf(folder / "x.gguf", folder / "plain", "llama", (kind,))
    return (folder / "x.gguf").read_bytes()


def _edited(file: Path, at: int, new: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[at : at + len(new)] = new
    file.write_bytes(content)


WRONG: list[tuple[Callable[[Path], Any], str]] = [
    (lambda file: file.write_bytes(b""), "has 0 bytes and is no GGUF file"),
    (lambda file: _edited(file, 0, b"GGML"), "begins with b'GGML'; a GGUF file begins with b'GGUF'"),
    (lambda file: _edited(file, 4, b"\1"), r"is GGUF of version 1; wanted one of \(2, 3\)"),
    (
        lambda file: _edited(file, 4, b"\0\0\0\3"),
        r"is GGUF of version 50331648; wanted one of \(2, 3\), little",
    ),
    (lambda file: _edited(file, 8, b"\xff" * 8), "states 18446744073709551615 tensors; at most 16777216"),
    (lambda file: _edited(file, 16, b"\xff" * 6), "states 281474976710655 values; at most 16777216"),
    (lambda file: _edited(file, 24, b"\xff" * 8), "inside its header"),
    (lambda file: _edited(file, 32, b"\xff"), "that is not UTF-8"),
    (lambda file: file.write_bytes(file.read_bytes()[:200]), "states 21 tensors, more than its 200 bytes"),
    (lambda file: file.write_bytes(file.read_bytes()[:-64]), "bytes, and its tensor .* would end at"),
]


@pytest.mark.parametrize(("change", "text"), WRONG)
def test_damaged_files_are_refused(tmp_path: Path, change: Callable[[Path], Any], text: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content_of(Type.Q8_0))
    change(tmp_path / "x.gguf")
    with pytest.raises(JobFileError, match=rf"x\.gguf.*{text}"):
        open_checkpoint(tmp_path / "x.gguf")


@settings(
    max_examples=examples(100, 300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_header_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    original = tmp_path / "x.gguf"
    if not original.exists():
        original.write_bytes(content_of(Type.Q4_K))
    content = bytearray(content_of(Type.Q4_K))
    header = min(tensor.start for tensor in read_header(original).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "y.gguf").write_bytes(content[: data.draw(st.integers(0, header)) or None])
    with suppress(JobFileError):
        open_checkpoint(tmp_path / "y.gguf")


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        ({"general.architecture": "rwkv7"}, "general.architecture is 'rwkv7'; supported are llama, qwen2"),
        ({"general.type": "adapter"}, "is not a model: its general.type is 'adapter'"),
        ({"block_count": None}, "block_count is missing; wanted an integer from 1"),
        ({"attention.head_count": "four"}, "attention.head_count is 'four'; wanted an integer"),
        ({"attention.value_length": 32}, "attention.value_length is 32; wanted 16, as attention.key_length"),
        ({"attention.head_count_kv": [2, 1]}, r"attention.head_count_kv is \[2, 1\]; wanted an integer"),
        ({"rope.scaling.type": "dynamic"}, "rope.scaling.type is 'dynamic'; wanted none, linear or yarn"),
        ({"attention.causal": False}, "attention.causal is false, which is no decoder"),
        ({"block_count": 3}, "missing tensors: model.layers.2.input_layernorm.weight"),
        ({"feed_forward_length": 256}, "tensors of a wrong shape: model.layers.0.mlp.*instead of"),
    ],
)
def test_unsupported_features_are_named(tmp_path: Path, metadata: dict[str, Any], text: str) -> None:
    make_gguf(tmp_path / "x.gguf", tmp_path / "plain", "llama", metadata=metadata, **SMALL)
    with pytest.raises(JobFileError, match=text):
        open_checkpoint(tmp_path / "x.gguf")


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content_of(Type.TQ1_0))
    with pytest.raises(
        JobFileError, match=r"the tensor .* as ggml type 34, which is not supported.*Q4_K_M or Q8_0"
    ):
        open_checkpoint(tmp_path / "x.gguf")


def test_a_folder_of_several_models_is_refused(tmp_path: Path) -> None:
    for name in ("tiny-Q4_K_M", "tiny-Q8_0", "mmproj-tiny"):
        make_gguf(tmp_path / f"{name}.gguf", tmp_path / "plain", "llama", **SMALL)
    with pytest.raises(JobFileError, match=r"contains 2 models in GGUF: tiny-Q4_K_M\.gguf, tiny-Q8_0\.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "tiny-Q8_0.gguf").unlink()
    assert open_checkpoint(tmp_path).spec == open_checkpoint(tmp_path / "tiny-Q4_K_M.gguf").spec


def test_the_documentation_lists_the_supported_types() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text("utf-8")
    section = page.partition("### GGUF\n")[2].partition("\n### ")[0]
    lines = (line.strip("| ").partition(" | ") for line in section.splitlines() if line.startswith("| "))
    rows = {first: row for first, _, row in lines}
    named = {first: re.findall(r"`([\w-]+)`", row) for first, row in rows.items()}
    assert named["`general.architecture`"] == [*ARCHITECTURES]
    assert set(named["Types of tensors, in any mixture"]) == {each.name for each in TYPES.values()}
    tokenizers = {PIECES, BYTES, *SPLIT_RULES}
    assert (
        set(re.findall(r"`([\w-]+)`", rows["Tokenizers"].replace("`tokenizer.ggml.pre`", ""))) == tokenizers
    )
