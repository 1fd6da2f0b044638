"""The structures that the C operators take. Pointers are addresses of tensors; None is a null pointer."""

from __future__ import annotations

import ctypes

from torch import Tensor

LOG2_E = 1.4426950408889634  # factor of scores, because the operators compute powers of 2 instead of e
_P, _L, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIZES = [(name, _L) for name in ("q_heads", "kv_heads", "dim", "dim_pad", "block_size", "block_pad")]


class Weight(ctypes.Structure):
    """The C structure `Weight` of panels.h: a packed weight."""

    _fields_ = [
        *((name, _P) for name in ("panels", "bias", "starts", "scales")),
        ("outputs", _L),
        ("inputs", _L),
        ("zeros", _P),
        ("group", _L),
        *((name, _P) for name in ("added", "added_places")),
        ("added_first", _L),
        *((name, _L) for name in ("hadamard", "form")),
    ]


class LowRankStructure(ctypes.Structure):
    """The C structure of an adapted layer's LoRA factors in low_rank.h."""

    _fields_ = [
        *((name, ctypes.POINTER(Weight)) for name in "ab"),
        *((name, _L) for name in ("count", "outputs", "most_rank")),
    ]


class AdaptedStructure(ctypes.Structure):
    """The C structure of the tokens that have an adapter, and their buffers, in low_rank.h."""

    _fields_ = [(name, _P) for name in ("order", "places", "starts", "rows", "low", "values")]


class RotationStructure(ctypes.Structure):
    """The C structure of rotary embedding and QK-norm in pointwise.h."""

    _fields_ = [
        *((name, _P) for name in ("cosine", "sine")),
        *((name, _L) for name in ("pairs", "interleaved")),
        *((name, _P) for name in ("q_norm", "k_norm")),
        *((name, _F) for name in ("eps", "offset")),
    ]


class Cache(ctypes.Structure):
    """The C structure `Cache` of cache.h: K, V and their scales."""

    _fields_ = [(name, _P) for name in ("k", "v", "k_scale", "v_scale")]


class Teams(ctypes.Structure):
    """The C structure `Teams` of teams.h: pointers to operators that run within a team of threads."""

    _fields_ = [(name, _P) for name in ("store", "copy", "attend")]


class Heads(ctypes.Structure):
    """The C structure `Heads` of pointwise.h: the arguments of `rope_store`."""

    _fields_ = [
        *((name, _P) for name in "qkv"),
        ("stride", _L),
        *((name, _P) for name in ("positions", "slots")),
        ("cache", Cache),
        ("q_out", _P),
        ("rotation", RotationStructure),
        ("tokens", _L),
        *_SIZES,
    ]


class PlanStructure(ctypes.Structure):
    """The C structure of attention work items and block tables in plan.h."""

    _fields_ = [
        ("tables", _P),
        ("table_width", _L),
        ("items", _P),
        ("level_ends", _P),
        ("levels", _L),
        ("rows", _P),
        ("last_seen", _P),
        ("behind", _P),
    ]


class Attention(ctypes.Structure):
    """The C structure `Attention` of attention.h: the arguments of `paged_attention`."""

    _fields_ = [
        ("q", _P),
        ("cache", Cache),
        ("plan", ctypes.POINTER(PlanStructure)),
        ("state", _P),
        ("out", _P),
        *_SIZES,
        ("window", _L),
        *((name, _F) for name in ("scale", "cap", "within")),
        *((name, _P) for name in ("sinks", "bias")),
        *((name, _L) for name in ("bias_width", "bias_reach")),
    ]


class Latent(ctypes.Structure):
    """The C structure `Latent` of latent.h: the arguments of `latent_attention`."""

    _fields_ = [
        *((name, _P) for name in ("q", "cache")),
        ("plan", ctypes.POINTER(PlanStructure)),
        *((name, _P) for name in ("state", "out")),
        *((name, _L) for name in ("q_heads", "slice", "width", "rank", "block_size")),
        ("scale", _F),
    ]


class PartsStructure(ctypes.Structure):
    """The C structure of the copies that `copy_parts` makes, in parts.h."""

    _fields_ = [("fields", _P), ("count", _L)]

    @classmethod
    def of(cls, parts: Tensor | None) -> PartsStructure:
        """Return the C structure of the copies in a tensor (n, 4) int64, which must outlive it; None: no copies."""
        return cls(address(parts), 0 if parts is None else len(parts))


class Layer(ctypes.Structure):
    """The C structure `Layer` of layer.h: the weights of a decoder layer."""

    _fields_ = [
        *((name, _P * 4) for name in ("norms", "biases")),
        *((name, Weight) for name in ("qkv", "o", "up", "down")),
        ("rotation", RotationStructure),
        *((name, _L) for name in ("window", "kind", "centred", "norms_sums")),
        ("sinks", _P),
        ("adapters", LowRankStructure * 4),
    ]


class LayerStep(ctypes.Structure):
    """The C structure `LayerStep` of layer.h: the inputs and buffers of a decoder layer in a step."""

    _fields_ = [
        ("heads", Heads),
        ("attention", Attention),
        *((name, _P) for name in ("x", "residual", "normed", "qkv", "activated", "codes", "row_scales")),
        ("parts", PartsStructure),
        ("adapted", AdaptedStructure),
        ("teams", Teams),
    ]


class ExpertsStructure(ctypes.Structure):
    """The C structure of the arguments and buffers of the experts in experts.h."""

    _fields_ = [
        *((name, Weight) for name in ("gate_up", "down")),
        *((name, _P) for name in ("x", "chosen", "weights", "y", "loads")),
        *((name, _P) for name in ("starts", "blocks", "tokens_of", "places")),
        *((name, _P) for name in ("rows", "inner", "made", "codes", "row_scales", "wide")),
        ("wide_bytes", _L),
        *((name, _L) for name in ("tokens", "choices", "experts", "kind")),
    ]


def scoring(scale: float, soft_cap: float | None) -> dict[str, float]:
    """Return the fields of the C structure `Attention` that scale and cap attention scores.

    Args:
        scale: factor of q · k.
        soft_cap: cap of scores, cap × tanh(score / cap); None: no cap.
    """
    if soft_cap is None:
        return {"scale": scale * LOG2_E, "cap": 0.0, "within": 0.0}
    return {"scale": LOG2_E, "cap": soft_cap, "within": scale / soft_cap}


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's values, for a pointer of a C structure; None for None."""
    return None if tensor is None else tensor.data_ptr()
