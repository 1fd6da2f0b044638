"""Records what Triton would compile for a process's launches, while its interpreter runs them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

Key = tuple[str, tuple[Any, ...], tuple[Any, ...]]


@contextmanager
def recorded(runs: bool = True) -> Iterator[set[Key]]:
    """Yield the set of launched kernels with their specialisations, which grows with each launch in the
    block.

    It follows triton.runtime.jit: constants by value, pointers by type and divisibility by 16, None as a
    constant, integers by being 1 or a multiple of 16 unless declared variable, and the launch's options.

    Args:
        runs: if True, kernels also run.
    """
    found: set[Key] = set()
    run = InterpretedFunction.run

    def recording(self: Any, *arguments: Any, **options: Any) -> Any:
        found.add(_key(self, arguments, options))
        return run(self, *arguments, **options) if runs else None

    InterpretedFunction.run = recording
    try:
        yield found
    finally:
        InterpretedFunction.run = run


def _key(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Key:
    signature = inspect.signature(kernel.fn)
    names = signature.parameters.keys()
    given = {k: v for k, v in options.items() if k in names}
    bound = signature.bind(*arguments, **given)
    bound.apply_defaults()
    varying = kernel.kwargs.get("do_not_specialize") or ()
    classes = tuple(
        (name, _class(value, "constexpr" in str(signature.parameters[name].annotation), name in varying))
        for name, value in bound.arguments.items()
    )
    others = {k: v for k, v in options.items() if k not in names and k not in ("grid", "warmup")}
    return kernel.fn.__name__, classes, tuple(sorted(others.items()))


def _class(value: Any, constant: bool, varies: bool) -> Any:
    if constant or value is None or isinstance(value, bool):
        return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
    if isinstance(value, Tensor):
        return str(value.dtype), value.data_ptr() % 16 == 0
    if isinstance(value, int):
        size = "i32" if -(2**31) <= value < 2**31 else "i64"
        return size if varies else (size, value == 1, value % 16 == 0)
    return type(value).__name__
