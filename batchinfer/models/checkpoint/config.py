"""Reads the configuration of a checkpoint: config.json, and the EOS ids of generation_config.json. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from batchinfer.models.families.family import ConfigFiles, Family
from batchinfer.models.families.multimodal import MULTIMODAL, Multimodal
from batchinfer.models.families.registry import FAMILIES
from batchinfer.models.files.config_fields import (
    Fields,
    checkpoint_error,
    load_if_there,
    read_config_json,
    shown,
)
from batchinfer.models.formats.registry import stored_format
from batchinfer.models.spec.rope_config import RopeConfig
from batchinfer.models.spec.spec import ModelSpec, cache_mistakes

Known = TypeVar("Known", Family, Multimodal, Family | Multimodal)


def load_config(folder: Path) -> ModelSpec:
    """Read config.json and generation_config.json in a checkpoint folder, and return the spec of the model.

    Raises:
        JobFileError: The configuration is invalid or not supported. The message lists all errors.
    """
    return parse_config(
        read_config_json(folder),
        load_if_there(folder / "generation_config.json"),
        folder / "config.json",
    )


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any], path: Path) -> ModelSpec:
    """Return the spec of the model that configuration files describe.

    For a multimodal model, it is the spec of the decoder.

    Args:
        raw: The content of config.json.
        generation: The content of generation_config.json, or {} if the file is missing.
        path: The path of config.json, for messages.

    Raises:
        JobFileError: The configuration is invalid or not supported. The message lists all errors.
    """
    mistakes: list[str] = []
    family, raw, name = _decoder(raw, mistakes)
    stored_format(raw, mistakes)
    if family is None or mistakes:  # the other fields depend on the family
        raise checkpoint_error(path, *mistakes)
    files = ConfigFiles(Fields(raw, name, mistakes), Fields(generation, "generation_config.json", mistakes))
    spec = family.parse(files)
    if not mistakes:
        mistakes.extend(_contradictions(spec))
    if mistakes:
        raise checkpoint_error(path, *dict.fromkeys(mistakes))
    return spec


def is_supported(raw: Mapping[str, Any]) -> bool:
    """Return True if config.json has a supported model_type, and names no class in `architectures` or a supported one.

    Args:
        raw: The content of config.json.
    """
    return _family(raw, [], known_types()) is not None


def known_types() -> dict[str, Family | Multimodal]:
    """Return the supported model families and multimodal models by `model_type`, the key in config.json."""
    return {**FAMILIES, **MULTIMODAL}


def decoder_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that describes the decoder.

    For a multimodal model, this is text_config with its default values and the keys that are stored outside of it.

    Args:
        raw: The content of config.json.
    """
    whole = multimodal_of(raw)
    return raw if whole is None else whole.text_config(raw) or {}


def multimodal_of(raw: Mapping[str, Any]) -> Multimodal | None:
    """Return the kind of multimodal model that the content of config.json describes; None if it is not multimodal."""
    kind = raw.get("model_type")
    return MULTIMODAL.get(kind) if isinstance(kind, str) else None


def _decoder(raw: Mapping[str, Any], mistakes: list[str]) -> tuple[Family | None, Mapping[str, Any], str]:
    """Return the family of a model's decoder, its configuration, and the name of the configuration for messages.

    Args:
        raw: The content of config.json.
        mistakes: A message is appended if the model is not supported. Then the family is None.
    """
    known = _family(raw, mistakes, known_types())
    if not isinstance(known, Multimodal):
        return known, raw, "config.json"
    name, stated = "config.json (text_config)", known.text_config(raw)
    if stated is None:
        mistakes.append(f"config.json: text_config is {shown(raw.get('text_config'))}; wanted an object")
        return None, raw, name
    # `architectures` of text_config may name the multimodal class
    return _family({**stated, "architectures": None}, mistakes, FAMILIES, name), stated, name


def _family(
    raw: Mapping[str, Any], mistakes: list[str], known: Mapping[str, Known], name: str = "config.json"
) -> Known | None:
    kind, architectures = raw.get("model_type"), raw.get("architectures")
    family = known.get(kind) if isinstance(kind, str) else None
    if family is None:
        mistakes.append(f"{name}: model_type {shown(kind)} is not supported; {', '.join(known)} are")
    elif architectures and architectures not in [[name] for name in family.architectures]:
        mistakes.append(
            f"config.json: architectures {shown(architectures)} is not supported; "
            f"for {kind} [{family.architectures[0]!r}] is"
        )
        return None
    return family


def _contradictions(spec: ModelSpec) -> list[str]:
    """Return error messages about pairs of settings in config.json that contradict each other."""
    found = [f"config.json: {wrong}" for wrong in cache_mistakes(spec.caches)]
    if found:
        return found
    attention = spec.attention
    for rotation in {layer.rotation for layer in spec.layers}:
        if rotation is not None and rotation.rope is not None:
            found += _wrong_rotation(rotation.rope, rotation.dim, attention.head_dim)
    if spec.long_rope_beyond is not None and attention.cache.latent:
        found.append("config.json: rope type 'longrope' is not supported with latent attention")
    if attention.q_heads % attention.kv_heads:
        found.append(
            f"config.json: num_attention_heads {attention.q_heads} is no multiple of "
            f"num_key_value_heads {attention.kv_heads}"
        )
    return found


def _wrong_rotation(rope: RopeConfig, dim: int, head_dim: int) -> Iterator[str]:
    if dim % 2 or not dim:
        part = "" if dim == head_dim else f", {dim} of it rotated"
        yield f"config.json: head_dim is {head_dim}{part}; rotary embedding needs an even one"
    elif rope.kind == "longrope":
        for name, factors in (("short_factor", rope.short), ("long_factor", rope.long)):
            if len(factors) != dim // 2:
                yield f"config.json: {name} has {len(factors)} numbers; {dim // 2} pairs are rotated"
