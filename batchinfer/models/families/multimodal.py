"""Models of several parts, one of which is a decoder of our families: that part is run, on text alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.models.families.family import NamePrefixes

# transformers leaves out of text_config what equals its own defaults: these, of the sizes that a family must know
_SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)
ABSENT_SIZES: dict[str, dict[str, int]] = {
    kind: dict(zip(_SIZES, sizes, strict=True))
    for kind, sizes in {
        "gemma3_text": (262_208, 2304, 9216, 26, 8, 131_072),
        "llama": (32_000, 4096, 11_008, 32, 32, 2048),
        "mistral": (32_000, 4096, 14_336, 32, 32, 131_072),
        "qwen2": (151_936, 4096, 22_016, 32, 32, 32_768),
        "qwen3": (151_936, 4096, 22_016, 32, 32, 32_768),
        "granite": (32_000, 4096, 11_008, 32, 32, 2048),
        "cohere2": (256_000, 8192, 22_528, 40, 64, 8192),
    }.items()
}
# Stated next to text_config, these hold for the decoder where text_config is silent
_SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")
_TIED = "tie_word_embeddings"
# What transformers 4 and the published checkpoints write, and what transformers 5 does
_LLAVA_PREFIXES = (
    NamePrefixes("language_model.model.", "language_model."),
    NamePrefixes("model.language_model."),
)


@dataclass(frozen=True, slots=True)
class Multimodal:
    """A `model_type` whose config.json has the decoder's in `text_config`. `absent_text`: the decoder's model_type
    where it is not stated; `prefixes`: what may stand before the names of its tensors; `others`: what begins those of
    other parts, with or without "model." before it."""

    model_type: str
    architecture: str
    absent_text: str
    absent_tied: bool = True
    prefixes: tuple[NamePrefixes, ...] = _LLAVA_PREFIXES
    others: tuple[str, ...] = ("vision_tower", "multi_modal_projector")

    @property
    def architectures(self) -> tuple[str, ...]:
        """Classes that hold it."""
        return (self.architecture,)

    def text_config(self, raw: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return config.json's object about the decoder; None if it is no object."""
        stated = raw.get("text_config")
        if not isinstance(stated, Mapping):
            return None
        kind = stated.get("model_type", self.absent_text)
        shared = {key: raw[key] for key in _SHARED if raw.get(key) is not None}
        absent = ABSENT_SIZES.get(kind, {}) if isinstance(kind, str) else {}
        tied = [where[_TIED] for where in (raw, stated) if where.get(_TIED) is not None]
        return {
            **absent,
            **shared,
            **stated,
            "model_type": kind,
            _TIED: any(tied) if tied else self.absent_tied,
        }

    def part_of(self, tensor: str) -> str | None:
        """Return the other part that a tensor belongs to; None for the decoder's."""
        name = tensor.removeprefix("model.")
        return next((part for part in self.others if name == part or name.startswith(f"{part}.")), None)


_NEWLINE = ("vision_tower", "multi_modal_projector", "image_newline")
_IDEFICS: dict[str, Any] = {
    "absent_tied": False,
    "prefixes": (NamePrefixes("model.text_model."),),
    "others": ("vision_model", "connector"),
}
_KNOWN = (
    Multimodal("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),
    Multimodal("mistral3", "Mistral3ForConditionalGeneration", "mistral"),
    Multimodal("llava", "LlavaForConditionalGeneration", "llama", absent_tied=False),
    Multimodal(
        "llava_next", "LlavaNextForConditionalGeneration", "llama", absent_tied=False, others=_NEWLINE
    ),
    Multimodal("internvl", "InternVLForConditionalGeneration", "qwen2"),
    Multimodal("aya_vision", "AyaVisionForConditionalGeneration", "cohere2"),
    Multimodal("idefics3", "Idefics3ForConditionalGeneration", "llama", **_IDEFICS),
    Multimodal("smolvlm", "SmolVLMForConditionalGeneration", "llama", **_IDEFICS),
)
MULTIMODAL: dict[str, Multimodal] = {known.model_type: known for known in _KNOWN}
