"""Reads the adapter_config.json of a LoRA (Hu et al., 2021) in PEFT's format. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.core.hub import ADAPTER as CONFIG
from batchinfer.models.files.config_fields import Fields, load_json_object, shown

MAX_RANK = 4096
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")  # a pattern that is a name, not a regular expression
# Initialisations that also change the weights of the model
_CHANGES_WEIGHTS = ("pissa", "olora", "corda", "lora_ga")
# Keys that are refused if they are set, and why
_REFUSED: Mapping[str, str] = {
    "lora_bias": "biases of the factors are not computed",
    "modules_to_save": "it also contains complete modules; merge it into the model (PEFT: merge_and_unload)",
    "trainable_token_indices": "it changes embeddings, which all rows of a batch share; merge it into the model",
    "target_parameters": "it changes the stacked weights of experts, which is not computed; merge it into the model",
    "layer_replication": "it repeats layers, which makes another model of it; merge it into the model",
    "alora_invocation_tokens": "it begins in the middle of a prompt (aLoRA), which is not computed",
    "use_qalora": "its inputs are pooled (QALoRA), which is not computed",
    "use_bdlora": "its factors are block-diagonal (BD-LoRA), which is not computed",
    "arrow_config": "it routes tokens between adapters (Arrow), which is not computed",
    "megatron_config": "it is written for Megatron's modules",
}


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The settings in a LoRA adapter's adapter_config.json.

    The adapter changes the weight W of a module to W + scale B A.

    Args:
        rank: The configured rank of A and B. Modules may have other ranks.
        alpha: The alpha of modules without an entry in `alphas`.
        rank_stabilised: True: the scale is alpha / sqrt(rank) (Kalajdzievski, 2023). False: it is alpha / rank.
        alphas: The alpha of single modules, by the name of the module or the last parts of its name. None: no module
            has an alpha of its own.
        dora: True if the adapter is a DoRA (Liu et al., 2024), which must be merged into the weights.
    """

    rank: int
    alpha: float
    rank_stabilised: bool = False
    alphas: Mapping[str, float] | None = None
    dora: bool = False

    def scale(self, module: str, rank: int) -> float:
        """Return the scale of an adapter in one module, whose weight W the adapter changes to W + scale B A.

        Args:
            module: The name of the module.
            rank: The rank of the module's A and B.
        """
        alpha = self.alpha
        for pattern, own in (self.alphas or {}).items():
            if module == pattern or module.endswith("." + pattern):
                alpha = own
                break
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)


def read_adapter_config(path: Path) -> tuple[LoraConfig, list[str]]:
    """Return the LoRA configuration in an adapter_config.json, and an error message for each invalid setting in it.

    Raises:
        JobFileError: The file is not a JSON object.
    """
    raw, mistakes = load_json_object(path), list[str]()
    fields = Fields(raw, CONFIG, mistakes)
    if (kind := raw.get("peft_type")) != "LORA":
        mistakes.append(f"{CONFIG}: peft_type is {shown(kind)}; only LORA is computed")
        return LoraConfig(1, 1.0), mistakes
    mistakes += _refusals(raw)
    alphas = raw.get("alpha_pattern") or {}
    if not _is_pattern(alphas):
        wanted = "the names of modules, or of their ends, → numbers above 0"
        mistakes.append(f"{CONFIG}: alpha_pattern is {shown(alphas)}; wanted {wanted}")
        alphas = {}
    rank, alpha = fields.integer("r", 8, high=MAX_RANK), fields.number("lora_alpha", 8.0)
    ways = fields.boolean("use_rslora", False), dict(alphas), fields.boolean("use_dora", False)
    return LoraConfig(rank, alpha, *ways), mistakes


def _refusals(raw: Mapping[str, Any]) -> Iterator[str]:
    for key, why in _REFUSED.items():
        if raw.get(key):
            yield f"{CONFIG}: {key} is {shown(raw[key])}: {why}"
    if (bias := raw.get("bias", "none")) != "none":
        yield f"{CONFIG}: bias is {shown(bias)}: biases of an adapter are not computed; merge it into the model"
    begun = raw.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_WEIGHTS):
        yield (
            f"{CONFIG}: init_lora_weights is {shown(begun)}: it belongs to changed weights of the model; save it with "
            "path_initial_model_for_weight_conversion, which makes a plain LoRA of it"
        )


def _is_pattern(value: object) -> bool:
    # PEFT also allows regular expressions as names
    return isinstance(value, dict) and all(
        _PLAIN.fullmatch(name) and type(alpha) in (int, float) and 0 < alpha < 1e30
        for name, alpha in value.items()
    )
