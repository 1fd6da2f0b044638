"""Counts floating-point operations of torch in a reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operations per output value; a maximum, comparison, exp, tanh, erf or root counts as one
_EACH = {
    "add": 1,
    "sub": 1,
    "mul": 1,
    "div": 1,
    "pow": 1,
    "rsqrt": 1,
    "tanh": 1,
    "round": 1,
    "clamp": 1,
    "gt": 1,
    "lt": 1,
    "cumsum": 1,
    "silu": 4,  # negate, exp, add, divide
    "_softmax": 4,  # subtract the maximum, exp, sum, divide
    "_log_softmax": 4,  # subtract the maximum, exp, sum, subtract
}
# operations per input value
_REDUCED = {"mean": 1, "max": 1, "amax": 1}


class Count(TorchDispatchMode):
    """Counts operations inside a `with` block.

    Ignores scalars, moves, sorts and selections. Conversion to float8 counts as rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        first = result[0] if isinstance(result, (tuple, list)) else result
        given = next((a for a in args if isinstance(a, Tensor)), None)
        if name == "mm" and isinstance(given, Tensor):
            self.flops += 2 * given.shape[1] * first.numel()
        elif name in _REDUCED and isinstance(given, Tensor) and given.is_floating_point():
            self.flops += _REDUCED[name] * given.numel()
        elif isinstance(first, Tensor) and first.dim() and _is_float(given):
            each = _EACH.get(name, 0) + (name == "_to_copy" and first.dtype == torch.float8_e4m3fn)
            self.flops += each * first.numel()
        return result


def _is_float(given: Tensor | None) -> bool:
    return given is not None and given.is_floating_point()


def counted(function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """Return the number of operations of a call."""
    with Count() as count:
        function(*arguments, **options)
    return count.flops


def bytes_of(*tensors: Tensor) -> int:
    """Return the bytes of all values, each tensor once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
