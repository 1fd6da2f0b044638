"""Tests that the decoder of a multimodal model runs on text, and that other parts are never loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedModel

from batchinfer.core.errors import JobFileError
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.checkpoint.config import load_config
from batchinfer.models.families.multimodal import ABSENT_SIZES, MULTIMODAL
from batchinfer.models.opening import open_checkpoint
from batchinfer.models.sources import ModelSource, checkpoint_source
from tests.batchinfer.models.test_logits import check_logits
from tests.checkpoints import edit_json
from tests.multimodal_models import MODELS, SINGLE, make_multimodal, stated_text

GEMMA = "Gemma3ForConditionalGeneration"


def scaled(model: PreTrainedModel, scale: float) -> Callable[[torch.Tensor], SimpleNamespace]:
    return lambda ids: SimpleNamespace(logits=model(ids).logits * scale)


@pytest.mark.sample(8)
@pytest.mark.parametrize("own_names", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_logits(tmp_path: Path, name: str, own_names: bool) -> None:
    model = make_multimodal(tmp_path, name, own_names)
    # transformers 4 scaled logits as text_config says; 5 leaves that out in models of several parts
    scale = load_config(tmp_path).logit_multiplier
    checkpoint = check_logits(tmp_path, scaled(model, scale), lengths=(1, 17, 100))
    assert isinstance(open_checkpoint(tmp_path), type(checkpoint))
    stored = load_file(tmp_path / SINGLE)
    parts = ("vision_tower", "projector", "newline", "vision_model", "connector")
    others = {key for key in stored if any(part in key for part in parts)}
    assert others
    assert set(checkpoint.tensors) == set(stored) - others
    assert checkpoint.weight_bytes == sum(stored[key].nbytes for key in checkpoint.tensors)
    source = checkpoint_source(tmp_path)
    assert isinstance(source, ModelSource)
    assert source.parameters == sum(math.prod(stored[key].shape) for key in checkpoint.tensors)
    (notice,) = checkpoint.notices
    assert notice.startswith(f"{name}: text only; tensors that are not loaded: ")
    vision, projector = MULTIMODAL[MODELS[name][0]].others[:2]
    assert f" of {vision}" in notice
    assert f" of {projector}" in notice


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    make_multimodal(tmp_path, GEMMA)
    return tmp_path


def test_every_kind_is_tested() -> None:
    assert {kind: name for name, (kind, *_) in MODELS.items()} == {
        kind: known.architecture for kind, known in MULTIMODAL.items()
    }


@pytest.mark.parametrize("kind", ABSENT_SIZES)
def test_sizes_missing_in_text_config_are_transformers_defaults(kind: str) -> None:
    theirs = AutoConfig.for_model(kind).to_dict()
    assert {key: theirs[key] for key in ABSENT_SIZES[kind]} == ABSENT_SIZES[kind]


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_keys_missing_in_config_json_have_transformers_defaults(kind: str) -> None:
    theirs = AutoConfig.for_model(kind)
    assert MULTIMODAL[kind].absent_text == theirs.text_config.model_type
    assert MULTIMODAL[kind].absent_tied == theirs.tie_word_embeddings


def test_a_sparse_text_config(tmp_path: Path) -> None:
    """As in the published Gemma 3 4B; the rest are transformers' defaults."""
    make_multimodal(tmp_path, GEMMA)
    stated = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    edit_json(
        tmp_path / "config.json", text_config=stated, dtype=..., torch_dtype="bfloat16", eos_token_id=[1, 106]
    )
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    spec = load_config(tmp_path)
    attention = spec.layers[5].attention
    assert (spec.vocab, spec.hidden, len(spec.layers), spec.tied) == (262_208, 2560, 34, True)
    assert (spec.dtype, spec.eos_token_ids, spec.max_positions) == ("bfloat16", (1, 106), 131_072)
    assert (attention.q_heads, attention.kv_heads, attention.head_dim) == (8, 4, 256)
    assert attention.rotation.rope is not None
    assert (attention.rotation.rope.kind, attention.rotation.rope.factor) == ("linear", 8.0)
    assert spec.windows[:6] == (*(1024,) * 5, None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_config": None}, ("text_config is None", "wanted an object")),
        (
            {"text_config": {"model_type": "ministral3"}},
            ("(text_config): model_type 'ministral3'", "gemma3_text"),
        ),
        ({"architectures": ["Gemma3Other"]}, ("architectures ['Gemma3Other'] is not supported", GEMMA)),
    ],
)
def test_refused(gemma: Path, change: dict[str, Any], words: tuple[str, ...]) -> None:
    edit_json(gemma / "config.json", **change)
    with pytest.raises(JobFileError) as raised:
        inspect_checkpoint(gemma)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_mistakes_name_text_config(gemma: Path) -> None:
    edit_json(gemma / "config.json", text_config={**stated_text(gemma), "hidden_size": "wide"})
    with pytest.raises(JobFileError, match=r"config.json \(text_config\): hidden_size is 'wide'"):
        inspect_checkpoint(gemma)


def test_a_tensor_of_no_known_part(gemma: Path) -> None:
    stored = load_file(gemma / SINGLE)
    save_file({**stored, "audio_tower.weight": torch.ones(2)}, gemma / SINGLE)
    with pytest.raises(JobFileError, match=r"unexpected tensors: audio_tower.weight"):
        inspect_checkpoint(gemma)
