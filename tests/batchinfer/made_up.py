"""Made-up families of models, and a plain decoder for them: whole rows in torch, without a cache.

Their layers may have no attention, read the K and V of an earlier layer, or have a window. Otherwise they are
Llama layers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchinfer.models.checkpoint.config import parse_config
from batchinfer.models.checkpoint.dummy import DummyWeights
from batchinfer.models.families.family import (
    ConfigFiles,
    Family,
    attention,
    gated_feed_forward,
    hidden_size,
    layer_count,
    model,
    rms_eps,
)
from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.spec.spec import LayerSpec, ModelSpec, NormSpec

NAME, THETA, EPS = "larch", 10_000.0, 1e-5


def parse_larch(files: ConfigFiles) -> ModelSpec:
    """Parse a configuration.

    Its keys: `reads` has per layer the layer whose K and V it reads, its own number, or null without
    attention. `windows` has the window per layer. `cache_dtype` is the dtype of quantised caches, if any.
    """
    fields = files.config
    norm, fed = NormSpec(hidden_size(fields), rms_eps(fields)), gated_feed_forward(fields)
    normed, biased = fields.boolean("qk_norm", False), fields.boolean("attention_bias", False)
    attended = attention(fields, qk_norm=NormSpec(1, EPS) if normed else None, qkv_bias=biased)
    attended = replace(attended, cache_dtype=fields.raw.get("cache_dtype"))
    layers = []
    for number in range(layer_count(fields)):
        read, window = fields.raw["reads"][number], fields.raw["windows"][number]
        own = replace(attended, window=window, kv_layer=None if read == number else read)
        layer = LayerSpec(norm.width, norm, own, norm, fed)
        layers.append(layer if read is not None else replace(layer, input_norm=None, attention=None))
    return model(NAME, files, tuple(layers))


LARCH = Family(NAME, ("LarchForCausalLM",), parse_larch)


def register(patch: pytest.MonkeyPatch) -> None:
    """Register the family until the patch is undone."""
    patch.setitem(FAMILIES, NAME, LARCH)


@dataclass(frozen=True)
class MadeUp:
    """A model of this family."""

    reads: tuple[int | None, ...]
    windows: tuple[int | None, ...] = ()
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        layers = len(self.reads)
        sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": layers, "vocab_size": 256}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        rest = {"max_position_embeddings": 512, "rms_norm_eps": EPS, "rope_theta": THETA, "eos_token_id": 255}
        kind = {"model_type": NAME, "architectures": ["LarchForCausalLM"], "hidden_act": "silu"}
        windows = self.windows or (None,) * layers
        return {**kind, **sizes, **heads, **rest, "reads": self.reads, "windows": windows, **self.more}

    @property
    def spec(self) -> ModelSpec:
        return parse_config(self.config, {}, Path("larch") / "config.json")

    def write(self, folder: Path, seed: int) -> None:
        """Write a checkpoint with random weights, also in norms."""
        generator = torch.Generator().manual_seed(seed)
        tensors = dict(DummyWeights(self.spec, torch.float32, "cpu", seed).named_tensors())
        for tensor in tensors.values():
            if tensor.dim() == 1:
                tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """Return x, [n, heads, D], rotated with row i at position i."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] / THETA ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@dataclass(frozen=True)
class PlainDecoder:
    """A reference decoder that reads the checkpoint's files itself.

    Attributes:
        coded: if True, K and V are rounded to the cache's values.
    """

    folder: Path
    coded: bool = True

    @cached_property
    def _raw(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "config.json").read_text())
        return found

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / "model.safetensors")

    def _linear(self, layer: int, name: str, x: Tensor) -> Tensor:
        start = f"model.layers.{layer}.{name}"
        return F.linear(x, self._tensors[start + ".weight"], self._tensors.get(start + ".bias"))

    def _heads(self, layer: int, name: str, x: Tensor) -> Tensor:
        """Return [n, heads, D], with norms if the layer has them."""
        made = self._linear(layer, f"self_attn.{name}_proj", x).view(len(x), -1, self._raw["head_dim"])
        norm = self._tensors.get(f"model.layers.{layer}.self_attn.{name}_norm.weight")
        return made if norm is None else rms(made, norm)

    def _kept(self, x: Tensor) -> Tensor:
        """Return K or V rounded like the layer's cache: a head's largest magnitude becomes the largest value."""
        if not self.coded or "cache_dtype" not in self._raw:
            return x
        most = x.abs().amax(-1, keepdim=True)
        if self._raw["cache_dtype"] == "int8":
            return (x / most * 127).round() * most / 127
        return (x / most * 448).to(torch.float8_e4m3fn).float() * most / 448

    def _attention(self, layer: int, x: Tensor, kept: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        read, window = self._raw["reads"][layer], self._raw["windows"][layer]
        q = rotated(self._heads(layer, "q", x))
        if read == layer:
            k, v = rotated(self._heads(layer, "k", x)), self._heads(layer, "v", x)
            kept[layer] = self._kept(k), self._kept(v)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in kept[read])
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        at = torch.arange(len(x))
        seen = at[None] <= at[:, None]
        seen &= at[None] > at[:, None] - (window or len(x))
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        made = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        return self._linear(layer, "self_attn.o_proj", made)

    def logits(self, ids: list[int]) -> Tensor:
        """Return the logits, [n, vocab]."""
        tensors, kept = self._tensors, dict[int, tuple[Tensor, Tensor]]()
        h = tensors["model.embed_tokens.weight"][ids]
        for layer, read in enumerate(self._raw["reads"]):
            start = f"model.layers.{layer}."
            if read is not None:
                h = h + self._attention(layer, rms(h, tensors[start + "input_layernorm.weight"]), kept)
            x = rms(h, tensors[start + "post_attention_layernorm.weight"])
            gate, up = (self._linear(layer, f"mlp.{name}_proj", x) for name in ("gate", "up"))
            h = h + self._linear(layer, "mlp.down_proj", F.silu(gate) * up)
        return rms(h, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T

    def greedy(self, prompt: list[int], most: int) -> tuple[list[int], Tensor]:
        """Return a greedy answer and the logits before its tokens."""
        ids, end = list(prompt), self._raw["eos_token_id"]
        while len(ids) < len(prompt) + most and (len(ids) == len(prompt) or ids[-1] != end):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :], self.logits(ids[:-1])[len(prompt) - 1 :]
