"""Whether this process may use the CPU's matrix tiles (Intel's AMX): what the system grants, not what the CPU is.

No torch."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# What products are computed in: vectors; the CPU's tiles; for tests, in plain C that any CPU can run, tiles, or Arm's
# matrix multiply-accumulate
TileWay = Literal["none", "granted", "emulated", "emulated_mmla"]
# How tiles.h and mmla.h are told. "granted" leaves it to the compiler, who knows the CPU.
OPTIONS: dict[TileWay, tuple[str, ...]] = {
    "none": ("-DNO_TILES",),
    "granted": (),
    "emulated": ("-DEMULATED_TILES",),
    "emulated_mmla": ("-DNO_TILES", "-DEMULATED_MMLA"),
}
FLAGS = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
# Of Linux on x86-64: arch_prctl's number, ARCH_REQ_XCOMP_PERM, and the state component that holds the tiles
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class Grant:
    """Whether tiles may be used; where the CPU has them and they may not, `refusal` says why."""

    given: bool
    refusal: str = ""

    @property
    def way(self) -> TileWay:
        """How operators for this process are built."""
        return "granted" if self.given else "none"


@functools.cache
def tile_grant() -> Grant:
    """Asks the system once a process, for all its threads, those to come included."""
    return ask(_flags(Path("/proc/cpuinfo")), _request)


def ask(flags: frozenset[str], request: Callable[[], int]) -> Grant:
    """`request` asks for the tiles' state and gives the error's number, 0 for none."""
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
