"""Reads the rotary position embedding of config.json, in the formats of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from batchinfer.models.files.config_fields import Fields, shown

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The parameters of a variant of rotary embedding (RoPE).

    Parameters that the variant does not use keep their defaults.

    Args:
        kind: The variant.
        theta: The base of the angles.
        factor: The factor by which contexts may be longer than the original length.
        original_max_positions: The original context length in tokens; 0 if the kind does not use it.
        low_freq_factor: For llama3: angles with a wavelength above original length / low_freq_factor are divided by
            `factor`.
        high_freq_factor: For llama3: angles with a wavelength below original length / high_freq_factor are kept.
        beta_fast: For yarn: the angles of pairs that rotate more than this number of times over the original length are
            kept.
        beta_slow: For yarn: the angles of pairs that rotate less than this number of times over the original length are
            divided by `factor`.
        truncate: For yarn: if True, the range of pairs between beta_fast and beta_slow is rounded to whole pairs.
        attention_factor: For yarn and longrope: the factor of cosines and sines.
        short: For longrope: the factor of each pair's period, for sequences within the original length.
        long: For longrope: the factor of each pair's period, for longer sequences.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


def _stated(raw: Mapping[str, Any]) -> Any:
    # transformers has this precedence
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def rotary_part(raw: Mapping[str, Any], head_dim: int, mistakes: list[str], absent: float = 1.0) -> int:
    """Return the number of rotated values of a head, from `partial_rotary_factor` of config.json.

    Args:
        raw: The content of config.json.
        head_dim: The number of values of a head, which is the result if the factor is invalid.
        mistakes: Receives an error message if the factor is invalid.
        absent: The default factor.
    """
    source = _stated(raw)
    stated = source.get("partial_rotary_factor") if isinstance(source, Mapping) else None
    if stated is None:
        stated = raw.get("partial_rotary_factor")
    factor = absent if stated is None else stated
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor <= 1:
        mistakes.append(
            f"config.json: partial_rotary_factor is {shown(factor)}; wanted a number above 0 and up to 1"
        )
        return head_dim
    return int(head_dim * factor)


def parse_rope(
    raw: Mapping[str, Any],
    max_positions: int,
    mistakes: list[str],
    partial: bool = False,
    absent_theta: float = 10_000.0,
) -> RopeConfig:
    """Return the parameters of the rotary embedding in config.json.

    Args:
        raw: The content of config.json.
        max_positions: The maximum length of a sequence in tokens.
        mistakes: Receives an error message for each invalid value.
        partial: If False, a `partial_rotary_factor` other than 1 is an invalid value.
        absent_theta: The default of `rope_theta`.
    """
    source = _stated(raw)
    if not isinstance(source, Mapping):
        mistakes.append(f"config.json: the rope parameters are {shown(source)}; wanted an object")
        return RopeConfig()
    rope = {"rope_theta": raw.get("rope_theta"), **source}
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its earlier name
    before = len(mistakes)
    _check_supported(kind, rope, raw, mistakes, partial)
    if len(mistakes) > before:
        return RopeConfig()
    # A value outside of the rope parameters takes precedence
    if raw.get("original_max_position_embeddings") is not None:
        rope["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    if rope["rope_theta"] is None:
        rope["rope_theta"] = absent_theta
    return _parse_kind(cast(RopeKind, kind), Fields(rope, "config.json (rope)", mistakes), max_positions)


def _check_supported(
    kind: object, rope: Mapping[str, Any], raw: Mapping[str, Any], mistakes: list[str], may_be_partial: bool
) -> None:
    if kind not in ROPE_KINDS:
        mistakes.append(f"config.json: rope type {shown(kind)} is not supported; {', '.join(ROPE_KINDS)} are")
    if any(isinstance(value, Mapping) for value in rope.values()):
        mistakes.append("config.json: rope parameters per layer type are not supported; one set is")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if not may_be_partial and partial is not None and partial != 1:
        mistakes.append(f"config.json: partial_rotary_factor {shown(partial)} is not supported; only 1 is")


def _parse_kind(kind: RopeKind, fields: Fields, max_positions: int) -> RopeConfig:
    theta = fields.number("rope_theta", above=1.0)
    if kind in ("default", "dynamic"):  # dynamic differs only beyond max_position_embeddings
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, fields.number("factor"))
    original = fields.integer("original_max_position_embeddings", max_positions, high=2**31 - 1)
    if kind == "longrope":
        return _parse_longrope(fields, theta, original, max_positions)
    return (_parse_llama3 if kind == "llama3" else _parse_yarn)(fields, theta, original, max_positions)


def _parse_llama3(fields: Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
    low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
    if high <= low:
        fields.mistakes.append(
            f"{fields.name}: high_freq_factor {high:g} must be greater than low_freq_factor {low:g}"
        )
    factor = fields.number("factor")
    return RopeConfig("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _parse_longrope(fields: Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
    factor = fields.number("factor", max_positions / original)
    usual = 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        "longrope",
        theta,
        factor,
        original,
        attention_factor=fields.number("attention_factor", usual),
        short=fields.numbers("short_factor"),
        long=fields.numbers("long_factor"),
    )


def _parse_yarn(fields: Fields, theta: float, original: int, max_positions: int) -> RopeConfig:
    factor = fields.number("factor", max_positions / original)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        beta_fast=fields.optional_number("beta_fast") or 32.0,
        beta_slow=fields.optional_number("beta_slow") or 1.0,
        truncate=fields.boolean("truncate", True),
        attention_factor=_yarn_attention_factor(fields, factor),
    )


def _yarn_attention_factor(fields: Fields, factor: float) -> float:
    # YaRN's rule is in its section 3.4; DeepSeek's uses mscale
    stated = fields.optional_number("attention_factor")
    mscale, mscale_all_dim = fields.optional_number("mscale"), fields.optional_number("mscale_all_dim")
    if stated is not None:
        return stated
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1.0)


def yarn_scale(raw: Mapping[str, Any], rope: RopeConfig) -> float:
    """Return the factor by which DeepSeek multiplies queries and keys; 1 if config.json has no `mscale_all_dim`.

    Args:
        raw: The content of config.json.
        rope: The rotary embedding, from `parse_rope`.
    """
    stated = _stated(raw)
    weight = stated.get("mscale_all_dim") if isinstance(stated, Mapping) else None
    return _mscale(rope.factor, weight) if rope.kind != "default" and isinstance(weight, int | float) else 1.0


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
