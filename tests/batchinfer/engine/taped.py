"""A stand-in for CUDA graphs on a CPU: launches are taped and repeated on the same tensors.

It makes the mistakes of a real graph. A number from the host keeps the value of the recording. A tensor that
was created between two recordings keeps its old value. Tensors of a recording are poisoned before each
replay, which reveals early reads. Calls that a capture forbids raise: reading from the device and copying to
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves

from batchinfer.engine.graphs.graph_capture import GraphRecorder, R, Replay
from batchinfer.models.parallel.group import TorchGroup

FORBIDDEN = ("aten._local_scalar_dense", "aten.nonzero", "aten.lift_fresh", "aten.item")


class Taped(GraphRecorder):
    """Records graphs on a CPU.

    Attributes:
        launches: number of operators and kernels per recording.
    """

    def __init__(self) -> None:
        self.launches: list[int] = []
        self.replays = 0

    @property
    def taken_bytes(self) -> int:
        """Return a MiB per recording."""
        return len(self.launches) << 20

    def warm_up(self, run: Callable[[], object]) -> None:
        run()

    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        tape = _Tape()
        with _kernels_on(tape), tape:
            made = run()
        self.launches.append(len(tape.calls))
        tape.poison()

        def replay() -> None:
            self.replays += 1
            tape.play()

        return made, replay


class QuicklyTaped(Taped):
    """Records without a warm-up, as the interpreter compiles nothing."""

    def warm_up(self, run: Callable[[], object]) -> None:
        pass


class TapedGroup(TorchGroup):
    """Ranks whose collectives are recorded like NCCL's in a graph.

    A replay repeats each collective on the same tensors, with all ranks.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        return launched(partial(super().all_reduce, x), x)

    def all_gather(self, x: Tensor) -> Tensor:
        found, given = x.new_empty(self.size, *x.shape), x.contiguous()
        gather = super().all_gather
        return launched(lambda: found.copy_(gather(given)), found)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return launched(partial(super().broadcast, x, source), x)


def launched(call: Callable[[], object], result: Tensor) -> Tensor:
    """Make a call that fills a tensor, and repeat it in each replay if a recording is active."""
    tape: Any = _get_current_dispatch_mode()
    if isinstance(tape, _Tape):
        tape.launch(call)
    else:
        call()
    return result


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records torch operators with their inputs and outputs, and Triton kernels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Callable[[], Any], list[Tensor]]] = []
        self._made: dict[int, Tensor] = {}  # by where they lie
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(FORBIDDEN):
            raise RuntimeError(f"{func} inside a capture: the host waits for the device, or copies to it")
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        given = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        fresh = [tensor for tensor in results if _place(tensor) not in given]
        self._made |= {_place(tensor): tensor for tensor in fresh}
        if "empty" in str(func):
            # Only replays run the kernels that fill these, but operators of the recording may use them as indices
            for tensor in fresh:
                if not tensor.is_floating_point():
                    tensor.zero_()
        else:
            self.calls.append((partial(func, *args, **kwargs), results))
        return made

    def launch(self, kernel: Callable[[], object]) -> None:
        """Record a Triton kernel or a collective, which only replays run, as in CUDA's capture."""
        self.calls.append((partial(_nothing, kernel), []))

    def poison(self) -> None:
        """Overwrite the outputs with NaN, or with integers that are no index."""
        for tensor in self._made.values():
            byte = 0xFF if tensor.is_floating_point() else 0x7F
            if tensor.numel() and tensor.dtype != torch.bool:
                _bytes(tensor).fill_(byte)

    @torch.inference_mode()
    def play(self) -> None:
        """Run all recorded calls again."""
        self.poison()
        for call, results in self.calls:
            again = [leaf for leaf in tree_leaves(call()) if isinstance(leaf, Tensor)]
            for old, new in zip(results, again, strict=False):  # kernels of Triton's return none
                if _place(old) != _place(new):
                    old.copy_(new)


def _nothing(call: Callable[[], object]) -> None:
    call()


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> Tensor:
    whole: Any = torch.empty(0, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    found: Tensor = whole.set_(storage, 0, (storage.nbytes(),))
    return found


@contextmanager
def _kernels_on(tape: _Tape) -> Iterator[None]:
    """Record interpreted kernels on the tape."""
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def taped(executor: Any, *args: Any, **kwargs: Any) -> None:
        tape.launch(lambda: run(executor, *args, **kwargs))

    interpreter.GridExecutor.__call__ = taped
    try:
        yield
    finally:
        interpreter.GridExecutor.__call__ = run
