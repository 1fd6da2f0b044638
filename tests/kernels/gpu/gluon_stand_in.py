"""A fake of Gluon's language for compute capability 9.0, for our kernel: its Python runs over arrays.

Triton's interpreter does not support Gluon. The fake raises where a GPU would silently compute wrong results.
Results of asynchronous products are missing before they are waited for, copies arrive late, and unwritten
memory is NaN. `gluon_clocks` raises for reads and writes without a wait, in any order of the partitions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from tests.kernels.gpu.gluon_clocks import Agent, Allocation, Barrier, RaceError
from tests.kernels.gpu.gluon_partitions import Partition, Schedule
from tests.kernels.gpu.gluon_tensors import FUNCTIONS, Memory, Pages, Pointer, Tensor, plain

OPTIONS = ("num_warps", "maxnreg", "num_stages")
SHARED_BYTES = 232_448


class Shared:
    """A view of shared memory."""

    def __init__(self, program: Program, memory: Allocation, cells: Any, dtype: Any, layout: Any) -> None:
        self._program, self._memory, self._cells = program, memory, cells
        self.dtype, self.layout, self.type = dtype, layout, self

    @property
    def shape(self) -> list[int]:
        return list(self._cells.shape)

    def _view(self, cells: Any) -> Shared:
        return Shared(self._program, self._memory, cells, self.dtype, self.layout)

    def index(self, number: Any) -> Shared:
        return self._view(self._cells[number.__index__()])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        assert start + length <= self.shape[dim]
        return self._view(np.take(self._cells, range(start, start + length), dim))

    def reshape(self, shape: list[int]) -> Shared:
        return self._view(self._cells.reshape(shape))

    def permute(self, order: list[int]) -> Shared:
        return self._view(self._cells.transpose(order))

    def store(self, value: Tensor) -> None:
        assert (value.shape, value.dtype) == (self.shape, self.dtype), (
            "a stored value has the shape and dtype of its destination"
        )
        self._program.act()
        agent, cells = self._program.agent, self._cells.ravel()
        self._memory.note_write(agent, cells)
        self._memory.threads[cells] = agent.number
        self._memory.values[cells] = value.values.ravel()

    def load(self, layout: Any) -> Tensor:
        self._program.act()
        agent, cells = self._program.agent, self._cells.ravel()
        self._memory.note_read(agent, cells)
        self._memory.threads[cells] = agent.number
        return Tensor(self._memory.values[self._cells], self.dtype, layout)

    def begin_copy(self, copy: Agent) -> Callable[[Any], None]:
        """Begin a copy to this memory; return a function that writes the values."""
        cells = self._cells.ravel()
        self._memory.check_fenced(copy, cells)
        self._memory.note_write(copy, cells)
        self._memory.values[cells] = np.nan

        def write(values: Any) -> None:
            self._memory.values[cells] = values.ravel()

        return write

    def multiplied(self, cores: Agent) -> Callable[[], Any]:
        """Begin a product with this memory; return a function that reads the values."""
        assert isinstance(self.layout, gl.NVMMASharedLayout)
        assert len(self.shape) == 2
        self._memory.check_fenced(cores, self._cells.ravel())
        self._memory.note_read(cores, self._cells.ravel())
        return lambda: self._memory.values[self._cells]


class Barriers:
    def __init__(self, barriers: list[Barrier]) -> None:
        self._barriers = barriers

    def index(self, number: Any) -> Barrier:
        return self._barriers[number.__index__()]


class Product:
    """A product of tensor cores, which can only be read after a wait."""

    def __init__(self, first: Any, compute: Callable[[], Tensor], done: dict[int, int], early: bool) -> None:
        self.first, self._compute, self._done = first, compute, done
        self.result: Tensor | None = compute() if early else None
        self.ended = False

    def end(self, agent: Agent, dependents: tuple[Any, ...]) -> None:
        if isinstance(self.first, Tensor) and not any(one is self.first for one in dependents):
            raise RaceError(f"{agent.name} may reuse registers that are being multiplied")
        agent.learn(self._done)
        self.result, self.ended = self._compute() if self.result is None else self.result, True


class Program:
    """One program of a launch."""

    def __init__(self, place: tuple[int, ...], seed: int, options: dict[str, Any]) -> None:
        self.place, self.options = place, options
        self.schedule = Schedule(seed)
        self._main = self.agent = Agent("the program")
        self._cores: dict[int, Agent] = {}
        self._products: dict[int, list[Product]] = {}
        self._allocations: list[Allocation] = []
        self._copies: list[Agent] = []
        self._bytes = 0

    def language(self) -> dict[str, Any]:
        """Return the names that the kernel's module imports."""
        shown = SimpleNamespace(**{name: getattr(gl, name) for name in gl.__dict__ if name[0] != "_"})
        for name, function in FUNCTIONS.items():
            setattr(shown, name, function)
        for one in (self.program_id, self.allocate_shared_memory, self.warp_specialize):
            setattr(shown, one.__name__, one)
        barriers = SimpleNamespace(
            init=lambda bar, count: bar.init(count),
            MBarrierLayout=lambda: None,
            wait=self.wait,
            arrive=self.arrive,
            expect=self.expect,
        )
        return {
            "gl": shown,
            "mbarrier": barriers,
            "tma": SimpleNamespace(async_copy_global_to_shared=self.copy),
            "fence_async_shared": self.fence,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.await_products,
        }

    def program_id(self, axis: int) -> Tensor:
        return Tensor(self.place[axis], gl.int32)

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Any:
        self._bytes += int(np.prod(shape)) * dtype.primitive_bitwidth // 8
        assert self._bytes <= SHARED_BYTES, "shared memory is full"
        if dtype == gl.int64:
            return Barriers([Barrier() for _ in range(shape[0])])
        self._allocations.append(Allocation(shape))
        cells = np.arange(int(np.prod(shape))).reshape(shape)
        return Shared(self, self._allocations[-1], cells, dtype, layout)

    def act(self, until: Callable[[], bool] = lambda: True) -> None:
        """Pause before an action that other partitions see, until `until` returns True."""
        mine = self.agent
        self.schedule.act(until)
        self.agent = mine  # others ran in between

    def warp_specialize(self, functions: list[Any], warps: list[int], registers: list[int]) -> None:
        assert len(functions) == 1 + len(warps) == 1 + len(registers)
        partitions = []
        for function, arguments in functions:
            agent = Agent(f"{function.__name__} {len(partitions)}", self.agent.tell())
            partitions.append(Partition(agent, partial(self._become, agent, function, arguments)))
        self.schedule.run(partitions)
        self.agent = self._main
        for one in partitions:
            assert not self._products.get(one.agent.number), "a product is not waited for"
            self.agent.learn(one.agent.known)
        for copy in self._copies:
            assert self.agent.known.get(copy.number), "a copy is not waited for"

    def _become(self, agent: Agent, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.agent = agent
        function(*arguments)

    def wait(self, barrier: Barrier, parity: Any) -> None:
        self.act(lambda: barrier.passed(int(parity)))
        self.agent.learn(barrier.done)

    def arrive(self, barrier: Barrier, *, count: int = 1) -> None:
        self.act()
        barrier.arrive(self.agent.tell(), count)

    def expect(self, barrier: Barrier, size: int) -> None:
        self.act()
        barrier.arrive(self.agent.tell(), 1, size)

    def copy(self, pages: Pages, corner: list[Any], barrier: Barrier, place: Shared) -> None:
        assert (place.shape, place.layout, place.dtype) == (pages.block_type.shape, pages.layout, pages.dtype)
        self.act()
        copy = Agent(f"a copy of {pages.name}", self.agent.tell())
        write, box = place.begin_copy(copy), pages.box([int(at) for at in corner])
        self._copies.append(copy)

        def deliver() -> None:
            write(box)
            barrier.deliver(copy.tell(), pages.block_type.nbytes)

        self.schedule.copies.append(deliver)

    def fence(self) -> None:
        self.act()
        for memory in self._allocations:
            memory.fence(self.agent)

    def multiply(self, a: Any, b: Shared, acc: Tensor, *, use_acc: bool = True, is_async: bool) -> Product:
        self.act()
        _check_product(a, b, acc)
        cores = self._cores.setdefault(self.agent.number, Agent(f"products of {self.agent.name}"))
        cores.learn(self.agent.tell())
        left = a.multiplied(cores) if isinstance(a, Shared) else lambda: a.values
        right = b.multiplied(cores)

        def compute() -> Tensor:
            made = torch.from_numpy(left()) @ torch.from_numpy(right())  # NumPy would use all cores for it
            return Tensor(made.numpy() + (acc.values if use_acc else 0), gl.float32, acc.layout)

        early = self.schedule.random.random() < 0.5
        made = Product(a, compute, cores.tell(), early)
        self._products.setdefault(self.agent.number, []).append(made)
        assert is_async
        return made

    def await_products(self, left: int, deps: tuple[Any, ...]) -> Any:
        self.act()
        running = self._products.setdefault(self.agent.number, [])
        while len(running) > left:
            running.pop(0).end(self.agent, deps)
        if not all(one.ended for one in deps if isinstance(one, Product)):
            raise RaceError(f"{self.agent.name} reads a product that is not waited for")
        results = tuple(one.result if isinstance(one, Product) else one for one in deps)
        return results[0] if len(results) == 1 else results


def _check_product(a: Any, b: Shared, acc: Tensor) -> None:
    """Check the operands of a product instruction."""
    assert isinstance(acc, Tensor), "the sum is there"
    layout = acc.layout
    assert isinstance(layout, gl.NVMMADistributedLayout)
    (rows, inner), (second, columns) = a.shape, b.shape
    assert (inner, acc.shape) == (second, [rows, columns])
    assert a.dtype == b.dtype
    assert a.dtype in (gl.bfloat16, gl.float16)
    assert (acc.dtype, layout.version) == (gl.float32, [3, 0])
    sixteen, n, k = layout.instr_shape
    assert (sixteen, k, n % 8) == (16, 16, 0)
    assert n <= 256
    assert (rows % 64, columns % n, inner % k) == (0, 0, 0)
    assert isinstance(a, Shared) or a.layout == gl.DotOperandLayout(0, layout, 2)


class Launcher:
    """Replaces a kernel: `launcher[grid](…)` runs it."""

    def __init__(self, module: ModuleType, kernel: str, seed: int) -> None:
        self._module, self._kernel, self._random = module, getattr(module, kernel), random.Random(seed)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(**given: Any) -> None:
            arguments = {name: _given(name, plain(one)) for name, one in given.items() if name not in OPTIONS}
            places = list(product(*map(range, grid)))
            self._random.shuffle(places)
            for place in places:
                program = Program(place, self._random.randrange(2**32), given)
                _bound(self._module, self._kernel, program)(**arguments)
            for one in arguments.values():
                if isinstance(one, Pointer) and one.memory.name == "out_ptr":
                    one.memory.give_back()

        return launch


def _given(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(Memory(name, value))
    if isinstance(value, TensorDescriptor):
        return Pages(name, value)
    if isinstance(value, float):
        return Tensor(np.float32(value), gl.float32)
    runtime = isinstance(value, int) and not isinstance(value, bool) and not name.isupper()
    return Tensor(value, gl.int32) if runtime else value


def _bound(module: ModuleType, kernel: Any, program: Program) -> Callable[..., None]:
    """Return the kernel with its module's functions bound to this fake language."""
    names = dict(vars(module))
    for name, value in (*vars(module).items(), ("_kernel", kernel)):
        if isinstance(value, JITFunction):
            function = value.fn
            names[name] = FunctionType(function.__code__, names, name, function.__defaults__)
    names.update(program.language())
    made: Callable[..., None] = names["_kernel"]
    return made
