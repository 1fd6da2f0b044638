"""The structures that the C operators take; pointers are addresses of tensors, None for none."""

from __future__ import annotations

import ctypes

from torch import Tensor

LOG2_E = 1.4426950408889634  # the scale of attention times this: exponentials are powers of 2
_P, _L, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIZES = [(name, _L) for name in ("q_heads", "kv_heads", "dim", "dim_pad", "block_size", "block_pad")]


class Weight(ctypes.Structure):
    """panels.h"""

    _fields_ = [
        *((name, _P) for name in ("panels", "bias", "starts", "scales")),
        ("outputs", _L),
        ("inputs", _L),
    ]


class Heads(ctypes.Structure):
    """pointwise.h"""

    _fields_ = [
        *((name, _P) for name in "qkv"),
        ("stride", _L),
        *((name, _P) for name in ("cosine", "sine", "positions", "slots")),
        *((name, _P) for name in ("k_cache", "v_cache", "q_out", "q_norm", "k_norm")),
        ("eps", _F),
        ("tokens", _L),
        ("pairs", _L),
        *_SIZES,
    ]


class PlanStructure(ctypes.Structure):
    """plan.h"""

    _fields_ = [
        ("tables", _P),
        ("table_width", _L),
        ("items", _P),
        ("level_ends", _P),
        ("levels", _L),
        ("rows", _P),
    ]


class Attention(ctypes.Structure):
    """attention.h"""

    _fields_ = [
        *((name, _P) for name in ("q", "k_cache", "v_cache")),
        ("plan", ctypes.POINTER(PlanStructure)),
        ("state", _P),
        ("out", _P),
        *_SIZES,
        ("window", _L),
        ("scale", _F),
    ]


class Layer(ctypes.Structure):
    """layer.h"""

    _fields_ = [
        *((name, _P) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, Weight) for name in ("qkv", "o", "gated", "down")),
        ("window", _L),
    ]


class LayerStep(ctypes.Structure):
    """layer.h"""

    _fields_ = [
        ("heads", Heads),
        ("attention", Attention),
        *((name, _P) for name in ("x", "residual", "normed", "qkv", "activated", "codes", "row_scales")),
    ]


def address(tensor: Tensor | None) -> int | None:
    """What a pointer of these structures is."""
    return None if tensor is None else tensor.data_ptr()
