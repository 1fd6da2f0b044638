"""Halves of a decode step's rows whose attention and products are in two queues: they wait for one another where they
must, and for nothing else."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

from tests.batchinfer.engine import halves_expected
from tests.gpu_suite.halves import HostQueue, Queue, run_layers


class Device:
    """Runs what its queues were given once all of it is known, in any order that their marks allow."""

    def __init__(self, chosen: Callable[[int], int]) -> None:
        self._chosen = chosen
        self.queues: list[LateQueue] = []
        self.order: list[str] = []

    def queue(self, name: str) -> LateQueue:
        """Return a further queue."""
        self.queues.append(LateQueue(self, name))
        return self.queues[-1]

    def run(self) -> None:
        """Run everything. Raises AssertionError where queues wait for one another."""
        while any(queue.left for queue in self.queues):
            ready = [queue for queue in self.queues if queue.is_ready]
            assert ready, "every queue waits"
            queue = ready[self._chosen(len(ready))]
            self.order.append(queue.step())


class LateQueue:
    """A queue whose calls run as late as its device likes."""

    def __init__(self, device: Device, name: str) -> None:
        self._device, self._name = device, name
        self._calls: list[tuple[Callable[[], object], list[Any]]] = []
        self._waits: list[Any] = []
        self.done = 0

    @property
    def left(self) -> int:
        return len(self._calls) - self.done

    @property
    def is_ready(self) -> bool:
        return self.left > 0 and all(queue.done >= at for queue, at in self._calls[self.done][1])

    def step(self) -> str:
        """Run the next call, and return the queue's name."""
        self._calls[self.done][0]()
        self.done += 1
        return self._name

    def run(self, call: Callable[[], None]) -> None:
        self._calls.append((call, self._waits))
        self._waits = []

    def mark(self) -> tuple[LateQueue, int]:
        return self, len(self._calls)

    def wait(self, mark: Any) -> None:
        self._waits.append(mark)

    def end(self, call: Callable[[], Tensor]) -> Tensor:
        found: list[Tensor] = []
        self.run(lambda: found.append(call()))
        self._device.run()
        return found[0]


class Numbers:
    """Rows whose layers are sums and products of two numbers."""

    def __init__(self, x: float) -> None:
        self._x = torch.tensor([x, -x])

    def begin(self) -> None:
        """NaN until a layer writes it."""
        self.qkv, self.attended = torch.full((2, 2), torch.nan)
        self.result = self._x

    def enter(self, weight: float) -> None:
        self.qkv.copy_(self.result * weight)

    def attend(self) -> None:
        self.attended.copy_(self.qkv + 1)

    def leave(self, weight: float) -> None:
        self.result = self.result + self.attended * weight


def run_in(products: Queue, attention: Queue) -> Tensor:
    """Run the layers of two halves in these queues."""
    parts, layers = [Numbers(2.0), Numbers(3.0)], [0.5, 0.25, 2.0]
    return run_layers(cast(Any, parts), cast(Any, layers), products, attention)


def run_on(device: Device) -> Tensor:
    """Run them in two queues of a device."""
    return run_in(device.queue("products"), device.queue("attention"))


@given(choices=st.lists(st.integers(0, 1), max_size=30))
def test_any_order_that_the_queues_allow_gives_the_same(choices: list[int]) -> None:
    found = run_on(Device(lambda count: (choices.pop() if choices else 0) % count))
    assert torch.equal(found, run_in(HostQueue(), HostQueue()))


def test_attention_to_one_half_has_the_time_of_the_products_of_the_other() -> None:
    """Whichever of the two is slower, the other goes on until it needs what the slower one makes."""
    slow_attention, slow_products = Device(lambda count: 0), Device(lambda count: count - 1)
    for device in (slow_attention, slow_products):
        run_on(device)
    begun = 2  # calls that make halves ready
    assert slow_attention.order[: begun + 3] == ["products"] * (begun + 2) + ["attention"]
    assert slow_products.order[begun : begun + 4] == ["products", "attention"] * 2


def test_what_is_expected_is_what_the_documentation_says() -> None:
    assert halves_expected.table() in (Path(__file__).parents[1] / "docs/gpu.md").read_text()
