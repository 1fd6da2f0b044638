"""Tests the family of docs/families.md: it runs and has a Llama's logits."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchinfer.core.errors import JobFileError
from batchinfer.models.checkpoint import tensor_names
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.families.family import NamePrefixes
from batchinfer.models.families.registry import FAMILIES
from tests.batchinfer.models.test_logits import check_logits
from tests.checkpoints import make_checkpoint

PAGE = Path(__file__).parents[3] / "docs" / "families.md"
SCALE = 2.5
RENAMED = {
    "num_attention_heads": "trunks",
    "intermediate_size": "crown",
    "num_hidden_layers": "rings",
}


@pytest.fixture
def baobab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Register the family of docs/families.md."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "baobab.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "baobab", raising=False)
    module = importlib.import_module("baobab")
    monkeypatch.setitem(FAMILIES, "baobab", module.FAMILY)
    return source


def grow(folder: Path) -> torch.nn.Module:
    """Turn a Llama's checkpoint into a Baobab's; return the Llama with scaled embeddings."""
    llama = make_checkpoint(folder, "llama", num_key_value_heads=4, rms_norm_eps=1e-5)
    raw = json.loads((folder / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw = {RENAMED.get(key, key): value for key, value in raw.items()}
    raw |= {"model_type": "baobab", "architectures": ["BaobabForCausalLM"], "rope_theta": rope["rope_theta"]}
    (folder / "config.json").write_text(json.dumps({**raw, "embedding_scale": SCALE}))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(raw["rings"]):
        start = f"model.layers.{layer}.mlp."
        gate, up = (tensors.pop(f"{start}{name}_proj.weight") for name in ("gate", "up"))
        tensors[start + "crown.weight"] = torch.cat([gate, up])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        llama.model.embed_tokens.weight.mul_(SCALE)
    return llama


@pytest.mark.usefixtures("baobab")
def test_the_family_of_the_page(tmp_path: Path) -> None:
    llama = grow(tmp_path / "model")
    checkpoint = check_logits(tmp_path / "model", llama)
    assert checkpoint.spec.family == "baobab"
    assert set(tensor_names.expected_shapes(checkpoint.spec, NamePrefixes("model."))) == set(
        checkpoint.tensors
    )


def test_the_family_file_is_short(baobab: str) -> None:
    assert len(baobab.splitlines()) < 100


@pytest.mark.usefixtures("baobab")
def test_a_part_that_is_too_short_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    grow(folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.crown.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JobFileError, match=r"crown.weight \[127, 48\] instead of \[128, 48\]"):
        inspect_checkpoint(folder)
