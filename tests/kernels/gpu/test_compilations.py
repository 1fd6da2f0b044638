"""Compilations are announced: whoever watches the process learns that a launch may take long."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
from contextlib import contextmanager
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from batchinfer_kernels.gpu.compilations import announce_compilations
from batchinfer_kernels.gpu.mask import _mask_kernel
from tests.kernels.gpu.aot import StubDriver

@contextmanager
def compiling():
    print("compiling")
    yield
    print("done")

def launch(tile):
    print(tile)
    logits, rows, bits = torch.empty(2, 64), torch.arange(2), torch.empty(2, 2, dtype=torch.int32)
    _mask_kernel.warmup(logits, 64, 64, rows, bits, 2, TILE=tile, grid=(1,))

driver.set_active(StubDriver(GPUTarget("cuda", 90, 32)))
announce_compilations(compiling)
"""


LAUNCHES = """
launch(64)
launch(64)
launch(32)
try: launch(63)
except Exception as error: print(type(error).__name__)
launch(16)
"""


def test_each_compilation_is_announced_once() -> None:
    """A failed one, of a tile that is no power of two, does not keep the next one silent."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CODE + LAUNCHES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    said = ["compiling", "done"]
    failed = ["63", "compiling", "CompilationError", "16", "done", *said]
    assert done.stdout.split() == ["64", *said, "64", "32", *said, *failed]
