"""The configuration of a model in a GGUF file, as config.json would state it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from batchinfer.core.gguf.files import GgufModel
from batchinfer.core.gguf.header import wrong_gguf
from batchinfer.core.gguf.vocabulary import vocabulary_of
from batchinfer.models.files.config_fields import Fields, shown
from batchinfer.models.files.weight_files import FLOAT_DTYPES
from batchinfer.models.gguf.architectures import ARCHITECTURES, Architecture, architecture_of

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
# Tensors of divisors of the rotation's frequencies: Llama 3's, and LongRoPE's for short and long rows
FACTORS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_MOST_LAYERS = 10_000
_INSTEAD = (
    "use the model's original release (safetensors weights, config.json and tokenizer.json), if docs/models.md lists "
    "its architecture: `batchinfer pull ORG/NAME` downloads it"
)


def config_of(model: GgufModel) -> tuple[Architecture, dict[str, Any]]:
    """Return how a GGUF file's model is stored, and the contents of an equivalent config.json.

    Raises:
        JobFileError: The model is not supported. The message lists all reasons.
    """
    known, name = architecture_of(model), model.metadata.get("general.architecture")
    if known is None:
        text = (
            f"{model.name}: general.architecture is {shown(name)}; supported are {', '.join(ARCHITECTURES)}"
        )
        raise wrong_gguf(model.path, text, hint=_INSTEAD)
    mistakes: list[str] = []
    fields = Fields(_stated(model, str(name)), f"{model.name} ({name})", mistakes)
    common = _common(fields, model, known)
    common |= _rope(fields, model, common["head_dim"])
    config = {**common, **known.adds(fields, model, common)}
    if fields.raw.get("attention.causal") is False:
        mistakes.append(
            f"{fields.name}: attention.causal is false, which is no decoder; decoders are supported"
        )
    if mistakes:
        raise wrong_gguf(model.path, *dict.fromkeys(mistakes))
    return known, {**config, **_tokens(model)}


def _stated(model: GgufModel, name: str) -> dict[str, Any]:
    start = f"{name}."
    found = {k.removeprefix(start): value for k, value in model.metadata.items() if k.startswith(start)}
    return {k: value[0] if _all_equal(value) else value for k, value in found.items()}


def _all_equal(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(each == value[0] for each in value)


def _common(fields: Fields, model: GgufModel, known: Architecture) -> dict[str, Any]:
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count", high=2**16)
    head = fields.integer("attention.key_length", max(1, hidden // heads), high=2**16)
    if fields.integer("attention.value_length", head, high=2**16) != head:
        fields.mistakes.append(
            f"{fields.name}: attention.value_length is {fields.raw['attention.value_length']}; wanted {head}, as "
            "attention.key_length"
        )
    table = model.tensors.get(EMBEDDING)
    if table is None:
        fields.mistakes.append(f"{model.name} has no tensor {EMBEDDING}, the embedding of its tokens")
    stated, ours = known.eps
    return {
        "model_type": known.model_type,
        "architectures": [known.of],
        "hidden_size": hidden,
        "num_hidden_layers": fields.integer("block_count", high=_MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads, high=2**16),
        "head_dim": head,
        "intermediate_size": fields.integer("feed_forward_length"),
        "max_position_embeddings": fields.integer("context_length", high=2**31 - 1),
        "vocab_size": 1 if table is None else table.shape[0],
        "tie_word_embeddings": HEAD not in model.tensors,
        ours: fields.number(stated),
        **_dtype(model),
    }


def _dtype(model: GgufModel) -> dict[str, str]:
    # A quantised file has float32 norms, which do not show the dtype of the model
    blocks = any(tensor.type.name not in FLOAT_DTYPES for tensor in model.tensors.values())
    return {"dtype": "bfloat16"} if blocks else {}


def _rope(fields: Fields, model: GgufModel, head: int) -> dict[str, Any]:
    rotated = fields.integer("rope.dimension_count", head, high=2**16)
    scaling: dict[str, Any] = {"rope_type": "default", **_scaling(fields, model)}
    found: dict[str, Any] = {"rope_theta": fields.number("rope.freq_base", 10_000.0), "rope_scaling": scaling}
    original = fields.optional_integer("rope.scaling.original_context_length")
    if original is not None and FACTORS not in model.tensors:
        found["original_max_position_embeddings"] = original
    if rotated != head:
        found["partial_rotary_factor"] = rotated / head
    return found


def _scaling(fields: Fields, model: GgufModel) -> dict[str, Any]:
    # Llama 3's factors become LongRoPE factors for all lengths
    if FACTORS in model.tensors:
        factors = _floats(model, FACTORS)
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
    if SHORT in model.tensors and LONG in model.tensors:
        short, long = _floats(model, SHORT), _floats(model, LONG)
        attention = fields.number("rope.scaling.attn_factor", 1.0)
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": attention,
        }
    kind, factor = fields.text("rope.scaling.type", "none"), fields.number("rope.scaling.factor", 1.0)
    if kind not in ("none", "linear", "yarn"):
        fields.mistakes.append(
            f"{fields.name}: rope.scaling.type is {shown(kind)}; wanted none, linear or yarn, or tensors of factors"
        )
    if kind == "none" or factor == 1.0:
        return _old_scaling(fields)
    return {"rope_type": kind, "factor": factor}


def _old_scaling(fields: Fields) -> dict[str, Any]:
    # Files from 2023
    linear = fields.number("rope.scale_linear", 1.0)
    return {} if linear == 1.0 else {"rope_type": "linear", "factor": linear}


def _floats(model: GgufModel, name: str) -> list[float]:
    tensor = model.tensors[name]
    if tensor.type.name != "F32" or len(tensor.shape) != 1:
        told = f"{list(tensor.shape)} of {tensor.type.name}; wanted one dimension of F32"
        raise wrong_gguf(model.path, f"{model.name}: {name} is {told}")
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        found: list[float] = np.frombuffer(file.read(tensor.end - tensor.start), "<f4").tolist()
    return found


def _tokens(model: GgufModel) -> Mapping[str, Any]:
    vocabulary = vocabulary_of(model)
    if vocabulary is None:
        return {}
    return {"bos_token_id": vocabulary.stated.get("bos_token_id"), "eos_token_id": vocabulary.ends}
