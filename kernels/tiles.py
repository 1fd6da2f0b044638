"""Detects whether this process may use the CPU's matrix tiles (Intel's AMX), which need a permission of the system.

Imports no torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# The instructions of matrix products: "none": vectors; "granted": the CPU's tiles; the others emulate AMX tiles, or
# Arm's matrix multiply-accumulate, in plain C for tests
TileWay = Literal["none", "granted", "emulated", "emulated_mmla"]
# Compiler options, read by tiles.h and mmla.h. "granted" needs none: -march=native enables tiles if the CPU has them
OPTIONS: dict[TileWay, tuple[str, ...]] = {
    "none": ("-DNO_TILES",),
    "granted": (),
    "emulated": ("-DEMULATED_TILES",),
    "emulated_mmla": ("-DNO_TILES", "-DEMULATED_MMLA"),
}
FLAGS = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
# Linux on x86-64: the number of arch_prctl, ARCH_REQ_XCOMP_PERM, and the state component of the tiles
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class Grant:
    """The system's answer to the request to use AMX tiles.

    Attributes:
        given: True if the process may use tiles.
        refusal: the reason of the refusal; "" if there is none, or the CPU has no tiles.
    """

    given: bool
    refusal: str = ""

    @property
    def way(self) -> TileWay:
        """Return the build variant of the CPU operators: "granted" with AMX tiles, "none" without."""
        return "granted" if self.given else "none"


@functools.cache
def tile_grant() -> Grant:
    """Ask the operating system once for permission to use AMX tiles, in all threads of this process.

    Later calls return the same answer.
    """
    return request_grant(_flags(Path("/proc/cpuinfo")), _request)


def request_grant(flags: frozenset[str], request: Callable[[], int]) -> Grant:
    """Ask for permission to use AMX tiles, if the CPU has them.

    Args:
        flags: flags of the CPU in /proc/cpuinfo.
        request: asks the operating system, and returns an error number, or 0 for permission.
    """
    if platform.machine() != "x86_64" or not flags >= FLAGS:
        return Grant(False)
    error = request()
    if not error:
        return Grant(True)
    return Grant(False, f"the system refuses the state of AMX tiles (arch_prctl: {os.strerror(error)})")


def _request() -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = (ctypes.c_long(number) for number in (_ARCH_PRCTL, _REQUEST, _TILE_DATA))
    return ctypes.get_errno() if libc.syscall(*numbers) else 0


def _flags(cpuinfo: Path) -> frozenset[str]:
    if not cpuinfo.exists():
        return frozenset()
    with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        return next((frozenset(line.split()) for line in lines if line.startswith("flags")), frozenset())
