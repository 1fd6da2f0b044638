"""Enables Triton's interpreter for this process, and fixes its mistakes.

Triton 3.6 to 3.9 store a bfloat16 tensor as uint16 and compute with these bits as integers. Here each
operation on such a tensor runs in float32 and rounds to the nearest even. Triton 3.6 and 3.7 also lose the
carry of a mantissa that rounds up to float8, and round a fused multiply-add twice. Tile products use the
BLAS, whose sums depend on a row's address on some CPUs. A tensor core's sums do not: here they use float64.

Two thirds of the interpreter's time went to unused results, which are skipped here.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Conversions know their types and are handled separately.
_CONVERSIONS = ("create_fp_to_fp", "create_fp_trunc", "create_fp_ext", "create_fp_to_si", "create_fp_to_ui")
_MORE = (
    "create_minimumf",
    "create_maximumf",
    "create_minnumf",
    "create_maxnumf",
    "create_clampf",
    "create_dot",
)

# Device files of NVIDIA, of NVIDIA under Windows, and of AMD
_DEVICES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")


def is_wanted() -> bool:
    """Return True if Triton is installed without a GPU. Torch imports slowly: it is only used if a device
    file exists."""
    if importlib.util.find_spec("triton") is None:
        return False
    if not any(Path(device).exists() for device in _DEVICES):
        return True
    import torch

    return not torch.cuda.is_available()


def switch_on() -> None:
    """Interpret kernels that are imported from now on, in this process only."""
    if "triton" in sys.modules:
        from triton import knobs

        if knobs.runtime.interpret:
            return
        raise RuntimeError("triton was imported before its interpreter was switched on")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton

        triton.knobs.runtime.interpret = True
        _patch_the_language_once()
        _leave_out_unread_checks()
        _keep_shapes()
        _keep_what_operands_become()
        _call_builtins_directly()
        _mend_fma()
        _mend_dot()
        _mend_bfloat16()
    finally:
        # The environment is inherited by the processes that tests start, which compile
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def widen(bits: np.ndarray) -> np.ndarray:
    """Convert bfloat16 bits (uint16) to float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """Convert float32 to bfloat16 bits (uint16), rounding to the nearest even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).reshape(np.shape(values))
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).astype(np.uint16)


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x y + z of float32 or float16, rounded once.

    float64 stores the product exactly. The error of its sum goes into the last bit, where the second rounding
    sees it (rounding to odd, Boldo and Melquiond, 2008).
    """
    product, wide = x.astype(np.float64) * y, z.astype(np.float64)
    total = np.asarray(product + wide)
    back = total - product
    lost = (product - (total - back)) + (wide - back)
    even = total.view(np.int64) & 1 == 0
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where((lost != 0) & even & np.isfinite(total), odd, total).astype(z.dtype)


def to_float8(values: np.ndarray) -> np.ndarray:
    """Convert float32 to float8_e4m3fn bits (uint8), rounding to the nearest even."""
    import torch

    rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn)
    return rounded.view(torch.uint8).numpy().reshape(values.shape)


def _patch_the_language_once() -> None:
    """Patch Triton's language once, at the first call of a kernel.

    Triton patches all names at each launch and each call of a device function, a third of the time. Here only
    the interpreter runs kernels.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    class Kept:
        def restore(self) -> None:
            """Keep the patches."""

    def once(kernel: Any) -> Kept:
        if kernel not in patched:
            patch(kernel)
            patched.add(kernel)
        return Kept()

    interpreter._patch_lang = once


def _leave_out_unread_checks() -> None:
    """Skip overflow checks of integers, which compute in 64 bits for an assertion that only `debug` enables."""
    from dataclasses import replace

    from triton.runtime.interpreter import interpreter_builder

    if not interpreter_builder.options.debug:
        interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)


def _keep_shapes() -> None:
    """Cache shapes, which Triton stores as tuples of its own constants, and skip broadcasts of equal shapes."""
    from functools import cache
    from math import prod

    import triton.language as tl
    from triton.runtime import interpreter

    @cache
    def described(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(prod(shape)), tl.core.tuple([tl.constexpr(s) for s in shape])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = described(tuple(type.shape.values) if type.is_block() else ())

    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    make_block_type = tl.core.block_type.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[s.value if isinstance(s, tl.constexpr) else s for s in shape])
        if key not in kinds:
            make_block_type(self, element_ty, shape)
            kinds[key] = dict(vars(self))
        vars(self).update(kinds[key])

    broadcast = interpreter.TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, x: Any, y: Any) -> Any:
        if x.type.is_block() and y.type.is_block() and x.type.shape.values == y.type.shape.values:
            return x, y
        return broadcast(self, x, y)

    tl.core.tensor.__init__ = tensor
    tl.core.block_type.__init__ = block_type
    interpreter.TritonSemantic.broadcast_impl_value = broadcast_impl_value
    interpreter._get_np_dtype = _kept_by_name(interpreter._get_np_dtype)


def _kept_by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache NumPy's type for each Triton type, for which Triton rebuilds a table at each call."""
    found: dict[str, Any] = {}

    def kept(kind: Any) -> Any:
        if kind.name not in found:
            found[kind.name] = find(kind)
        return found[kind.name]

    return kept


def _keep_what_operands_become() -> None:
    """Cache the types of operands, and skip copies of broadcast operands.

    Triton computes the types again for each operation and copies operands to the result's size. NumPy needs
    no copies.
    """
    from math import copysign

    import triton.language as tl
    from triton.runtime import interpreter

    find, tensor, handle = (
        interpreter.TritonSemantic.binary_op_type_checking_impl,
        tl.core.tensor,
        interpreter.TensorHandle,
    )
    found: dict[tuple[Any, ...], list[tuple[Any, Any, Any]]] = {}

    def named(value: Any) -> Any:
        """Return the key of an operand. The key of a number includes its sign, as 0.0 equals -0.0."""
        return value.type.name if type(value) is tensor else (type(value), value, copysign(1.0, value))

    def step(given: Any, made: Any) -> tuple[Any, Any, Any]:
        """Return how `made` differs from `given`: (number, new dtype, new type), each None if unchanged."""
        if type(given) is not tensor:
            return (made.handle.data.reshape(-1)[:1].copy(), made.handle.dtype), None, made.type
        converts = made.type.scalar.name != given.type.scalar.name
        same = made.type.name == given.type.name
        return None, made.type.scalar if converts else None, None if same else made.type

    def done(self: Any, given: Any, number: Any, scalar: Any, type: Any) -> Any:
        if number is not None:
            return tensor(handle(*number), type)
        if scalar is not None:
            given = self.cast(given, scalar)
        return given if type is None else tensor(given.handle, type)

    def become(self: Any, lhs: Any, rhs: Any, *options: bool, **more: bool) -> tuple[Any, Any]:
        key = (named(lhs), named(rhs), options, *more.items())
        steps = found.get(key)
        if steps is None:
            pair: tuple[Any, Any] = find(self, lhs, rhs, *options, **more)
            found[key] = [step(given, made) for given, made in zip((lhs, rhs), pair, strict=True)]
            return pair
        return done(self, lhs, *steps[0]), done(self, rhs, *steps[1])

    to_tensor = interpreter.TritonSemantic.to_tensor

    def as_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
        return value if type(value) is tensor else to_tensor(self, value, check_type)

    interpreter.TritonSemantic.binary_op_type_checking_impl = become
    interpreter.TritonSemantic.to_tensor = as_tensor


def _call_builtins_directly() -> None:
    """Call functions of the language directly, without two wrappers that copy arguments and check constants."""
    import triton.language as tl
    from triton.runtime import interpreter

    wrapper = tl.core.builtin(lambda: None).__code__  # all that it adds is a check that there is a _semantic

    def patched(obj: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        inner = member.__wrapped__ if member.__code__ is wrapper else member

        def called(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return inner(*arguments, **named)

        scope.set_attr(obj, name, called)

    unwrap, plain = (
        tl.core._unwrap_if_constexpr,
        (tl.core.tensor, tl.core.dtype, int, float, bool, type(None)),
    )

    def unwrapped(value: Any) -> Any:
        if type(value) is tl.constexpr:
            return value.value
        return value if type(value) in plain else unwrap(value)

    def handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    interpreter._patch_attr = patched
    tl.core._unwrap_if_constexpr = unwrapped
    interpreter.TensorHandle.__init__ = handle


def _mend_fma() -> None:
    from triton.runtime import interpreter

    def patched(_builder: Any, x: Any, y: Any, z: Any) -> Any:
        return interpreter.TensorHandle(fused(x.data, y.data, z.data), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = patched


def _mend_dot() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def values(handle: Any) -> Any:
        if handle.dtype.primitive_bitwidth == 8 and handle.dtype.is_floating():
            return interpreter._convert_float(handle.data, handle.dtype, tl.float16, None).view(np.float16)
        return handle.data

    def patched(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32:
            return plain(self, a, b, d, *options)
        total = np.matmul(values(a), values(b), dtype=np.float64) + d.data
        return interpreter.TensorHandle(total.astype(np.float32), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = patched


def _mend_bfloat16() -> None:
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    names = {n for n in dir(builder) if n.startswith("create_f") and n not in _CONVERSIONS} | set(_MORE)
    for name in names:
        if hasattr(builder, name):
            setattr(builder, name, _computed_in_float32(getattr(builder, name), rounds=name != "create_dot"))
    for name in ("create_si_to_fp", "create_ui_to_fp"):
        setattr(builder, name, _from_integers(getattr(builder, name)))
    builder.get_bf16 = _constant
    interpreter._convert_float = _convert(interpreter._convert_float)
    for operations in (interpreter.ReduceOps, interpreter.ScanOps):
        operations.apply_impl = _reduced_in_float32(operations.apply_impl)


def _is_bfloat16(handle: Any) -> bool:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not isinstance(handle, TensorHandle) or handle.data.dtype != np.uint16:
        return False
    return bool(getattr(handle.dtype, "scalar", handle.dtype) == tl.bfloat16)


def _wide(handle: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(widen(handle.data), tl.float32) if _is_bfloat16(handle) else handle


def _narrow(handle: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if not isinstance(handle, TensorHandle) or handle.data.dtype != np.float32:
        return handle
    return TensorHandle(narrow(handle.data), tl.bfloat16)


def _computed_in_float32(operation: Callable[..., Any], rounds: bool) -> Callable[..., Any]:
    def patched(self: Any, *arguments: Any, **options: Any) -> Any:
        if not any(_is_bfloat16(a) for a in arguments):
            return operation(self, *arguments, **options)
        result = operation(self, *[_wide(a) for a in arguments], **options)
        return _narrow(result) if rounds else result

    return patched


def _from_integers(operation: Callable[..., Any]) -> Callable[..., Any]:
    def patched(self: Any, source: Any, target: Any) -> Any:
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        if target.scalar == tl.bfloat16:
            return TensorHandle(narrow(source.data.astype(np.float32)), tl.bfloat16)
        return operation(self, source, target)

    return patched


def _constant(_builder: Any, value: float) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(narrow(np.array([value], np.float32)), tl.bfloat16)


def _convert(operation: Callable[..., Any]) -> Callable[..., Any]:
    def patched(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        import triton.language as tl

        if source == tl.float32 and target == tl.bfloat16:
            return narrow(values).reshape(values.shape)
        if target == tl.float8e4nv and source in (tl.float32, tl.float16, tl.bfloat16):
            return to_float8(widen(values) if source == tl.bfloat16 else values.astype(np.float32))
        return operation(values, source, target, rounding)

    return patched


def _reduced_in_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
    def patched(self: Any, given: Any) -> Any:
        import triton.language as tl

        tensors = given if isinstance(given, tuple) else (given,)
        if not any(_is_bfloat16(t.handle) for t in tensors):
            return operation(self, given)

        def up(t: Any) -> Any:
            return self.to_tensor(widen(t.handle.data), tl.float32) if _is_bfloat16(t.handle) else t

        def down(t: Any) -> Any:
            if t.dtype.scalar != tl.float32:
                return t
            return self.to_tensor(narrow(np.asarray(t.handle.data, np.float32))[()], tl.bfloat16)

        result = operation(self, tuple(map(up, tensors)) if isinstance(given, tuple) else up(given))
        return tuple(map(down, result)) if isinstance(result, (tuple, list)) else down(result)

    return patched
