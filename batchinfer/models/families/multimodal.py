"""Multimodal models whose decoder belongs to a supported family. Only the decoder is run, on text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchinfer.models.families.family import NamePrefixes

# transformers omits fields of text_config that equal its defaults. These are the defaults of the required sizes
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
# Fields next to text_config that apply to the decoder if text_config does not have them
_SHARED = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")
_TIED = "tie_word_embeddings"
# Of transformers 4 and published checkpoints, and of transformers 5
_LLAVA_PREFIXES = (
    NamePrefixes("language_model.model.", "language_model."),
    NamePrefixes("model.language_model."),
)


@dataclass(frozen=True, slots=True)
class Multimodal:
    """A type of multimodal model. batchinfer runs only its text decoder.

    Its configuration is `text_config` in config.json.

    Args:
        model_type: The `model_type` in config.json.
        architecture: The supported class of transformers.
        absent_text: The decoder's model_type if text_config has none.
        absent_tied: The default of tie_word_embeddings, if neither configuration has it.
        prefixes: The possible prefixes of the names of the decoder's tensors.
        others: Prefixes of the names of tensors that do not belong to the decoder, such as "vision_tower". An optional
            "model." may precede them.
    """

    model_type: str
    architecture: str
    absent_text: str
    absent_tied: bool = True
    prefixes: tuple[NamePrefixes, ...] = _LLAVA_PREFIXES
    others: tuple[str, ...] = ("vision_tower", "multi_modal_projector")

    @property
    def architectures(self) -> tuple[str, ...]:
        """Return the supported classes of transformers."""
        return (self.architecture,)

    def text_config(self, raw: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the text decoder's configuration, completed; None if config.json has no valid `text_config`.

        It consists of `text_config`, defaults, and some keys outside of `text_config`.

        Args:
            raw: The content of config.json.
        """
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
        """Return the part of the model that a tensor belongs to, such as "vision_tower"; None for the text decoder.

        Args:
            tensor: The name of the tensor.
        """
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
