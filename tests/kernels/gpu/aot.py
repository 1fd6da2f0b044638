"""Compiles kernels for GPUs that are not present, and reads the compiler's statistics.

A process that interprets kernels cannot compile them: each test process has a child for it.

compile_launch("tests.kernels.gpu.test_x:launch_x", ("bfloat16", 128), "sm_90")

This calls a function that launches kernels with CPU tensors, and compiles every launch with Triton's
specialisation for the GPU.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

NVIDIA = ("sm_80", "sm_90", "sm_100")
TARGETS = (*NVIDIA, "gfx942")
# Bytes of shared memory that a block may have: CUDA programming guide, compute capabilities; AMD: LDS of CDNA 3
SHARED_LIMIT = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}
# Bytes of stack that pass: what ptxas uses for its calls (10.x has some), and up to four values that it puts aside from
# the beginning of a kernel to its end in order to stay within a count of registers
STACK_LIMIT = 16
LOSS = "Potential Performance Loss"  # of ptxas' warnings, whatever it warns of


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel for one target."""

    kernel: str
    target: str
    registers: int  # a thread's; vector registers on AMD
    stack: int  # bytes a thread
    local: int  # bytes a thread
    spills: int  # AMD: vector registers (scalar ones go to their lanes, not to memory); NVIDIA: 0, see stack and local
    shared: int  # bytes a block
    ptx: str  # the assembly on AMD
    sass: str  # empty on AMD
    losses: tuple[str, ...] = ()  # of speed, that the assembler warns of

    def check(self, may_wait: bool = False, stack: int = STACK_LIMIT) -> None:
        """Check that nothing spilled and that shared memory fits, which the compiler does not check.

        Args:
            may_wait: if False, no product may wait for the one before.
        """
        assert may_wait or not self.losses, f"{self.summary()}: {self.losses}"
        assert max(self.stack - stack, self.local, self.spills) <= 0, self.summary()
        assert self.shared <= SHARED_LIMIT[self.target], self.summary()

    def summary(self) -> str:
        sizes = f"stack {self.stack}, local {self.local}, spills {self.spills}, shared {self.shared}"
        return f"{self.kernel} on {self.target}: {self.registers} registers, {sizes}"

    def wide_loads(self) -> int:
        """Return the number of global loads of 16 bytes per thread, including copies to shared memory."""
        return len(re.findall(r"\b(?:LDG|LDGSTS)\.E\.(?:\w+\.)*128", self.sass))

    def wide_stores(self) -> int:
        """Return the number of global stores of 16 bytes per thread."""
        return len(re.findall(r"\bSTG\.E\.(?:\w+\.)*128", self.sass))


def compile_launch(function: str, arguments: tuple[Any, ...], target: str) -> list[Compiled]:
    """Return every kernel that "module:function" launches with these arguments (JSON's types)."""
    return _worker().ask({"launch": function, "arguments": list(arguments), "target": target})


class _Worker:
    """A process that compiles, with requests as lines of JSON."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.gpu.aot"],
            cwd=Path(__file__).parents[3],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> list[Compiled]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return [Compiled(**{**found, "losses": tuple(found["losses"])}) for found in answer["compiled"]]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@cache
def _worker() -> _Worker:
    return _Worker()


# ---- the rest runs in the child


class StubDriver:
    """Pretends that there is a GPU, which makes Triton specialise launches for it."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> str:
        return str(self._target.arch)  # Triton keeps its compiled kernels by device

    def get_current_stream(self, _device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


def _gpu_target(name: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", int(name[3:]), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)


def _resolve(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def _compile_launches(request: dict[str, Any], target: Any) -> Iterator[Any]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(StubDriver(target))
    compiled, run = [], JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled.append(run(self, *arguments, grid=grid, warmup=True, **options))
        return compiled[-1]

    JITFunction.run = compile_only
    try:
        _resolve(request["launch"])(*request["arguments"])
    finally:
        JITFunction.run = run
    yield from compiled


def _said_of(kernel: Any, kind: str, tool: str, *options: str) -> str:
    """Return the output of NVIDIA's tool for a kernel's assembly (`kind`: ptx or cubin).

    The output is cached next to Triton's files of the kernel.
    """
    from triton.backends import nvidia
    from triton.runtime.cache import get_cache_manager

    kept, name = get_cache_manager(kernel.hash), f"{kernel.metadata.name}.{tool}"
    path = kept.get_file(name)
    if path is None:
        code = kernel.asm[kind]
        with tempfile.NamedTemporaryFile(suffix=f".{kind}") as file:
            file.write(code.encode() if isinstance(code, str) else code)
            file.flush()
            command = [Path(nvidia.__file__).parent / "bin" / tool, *options, file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        path = kept.put(done.stdout + done.stderr, name, binary=False)
    return Path(path).read_text()


def _losses(kernel: Any, target: str) -> tuple[str, ...]:
    """Return ptxas's warnings about serialised products (C7510 and similar), which Triton drops."""
    if "wgmma.mma_async" not in kernel.asm["ptx"]:
        return ()
    said = _said_of(kernel, "ptx", "ptxas", "-v", f"--gpu-name={target}a", "-o", os.devnull)
    return tuple(line for line in said.splitlines() if LOSS in line)


def _described(kernel: Any, target: str) -> Compiled:
    name, shared = kernel.metadata.name, kernel.metadata.shared
    if "cubin" not in kernel.asm:
        text = kernel.asm["amdgcn"]
        sizes = {k: int(v) for k, v in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)}
        return Compiled(name, target, sizes["vgpr_count"], 0, 0, sizes["vgpr_spill_count"], shared, text, "")
    sass = _said_of(kernel, "cubin", "cuobjdump", "--dump-resource-usage", "--dump-sass")
    sizes = {k: int(v) for k, v in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", sass)}
    memory = (sizes["STACK"], sizes["LOCAL"], 0, shared)
    return Compiled(name, target, sizes["REG"], *memory, kernel.asm["ptx"], sass, _losses(kernel, target))


def _answer(request: dict[str, Any]) -> list[Compiled]:
    target = _gpu_target(request["target"])
    kernels = _compile_launches(request, target)
    return [_described(k, request["target"]) for k in kernels]


def _serve() -> None:
    import traceback

    channel, sys.stdout = sys.stdout, sys.stderr  # the compiler's output may not mix with the reply
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"compiled": [asdict(c) for c in _answer(json.loads(line))]}
        except Exception:  # noqa: BLE001  the test raises it
            answer = {"error": traceback.format_exc()}
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


if __name__ == "__main__":
    _serve()
