"""The operators of a machine's first run, compiled while its input is read and planned; or at once, where nothing else
can be done meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batchinfer.plan.setup.numerics import Numerics
from batchinfer_kernels.cpu.background_build import BackgroundBuild
from batchinfer_kernels.cpu.compilers import NoCompiler

COMPILING_FIRST = "compiling the CPU operators for this machine (once)"
COMPILING = f"{COMPILING_FIRST}, while the input is read and planned"


class OperatorsBuild:
    """The build holds what the run says and records of compiling."""

    def __init__(
        self, build: BackgroundBuild | None, notice: Callable[[str], None], line: str = COMPILING
    ) -> None:
        """build: None where there is nothing to compile. line: what to say of it while it goes on."""
        self._build, self._notice, self._line = build, notice, line
        self._told = self._told_done = build is None
        self._needed_at: float | None = None

    def needed(self) -> None:
        """Note that from now on the engine waits for the operators."""
        self._needed_at = time.monotonic()
        self.look()

    def look(self) -> None:
        """Say once that the build goes on, and once that it is done. A failure is told by the engine, which fails
        likewise."""
        if not self._told and self._build is not None and self._build.error is None:
            self._told = True
            self._notice(self._line)
        if self._took is not None and not self._told_done:
            self._told_done = True
            self._notice(f"compiled the CPU operators in {self._took:.1f} s")

    @property
    def facts(self) -> dict[str, float]:
        """Seconds, by the names of the run table; nothing where nothing was compiled."""
        if self._build is None or self._build.ended is None or self._needed_at is None:
            return {}
        waited = max(0.0, self._build.ended - self._needed_at)
        return {"operators_build_s": self._build.ended - self._build.began, "operators_wait_s": waited}

    @property
    def _took(self) -> float | None:
        if self._build is None or self._build.ended is None:
            return None
        return self._build.ended - self._build.began


@contextmanager
def operators_built(
    numerics: Numerics, notice: Callable[[str], None], ours: bool = True
) -> Iterator[OperatorsBuild]:
    """Compile in the background where the device is a CPU whose operators are not there. A build that goes on when the
    block is left is ended: nobody needs it. `ours`: whether the engine has operators, and runs on this machine."""
    build = _build_for(numerics.device, numerics.kv_cache == "int8") if ours else None
    try:
        yield OperatorsBuild(build, notice)
    finally:
        if build is not None:
            build.stop()


def build_operators(device: str, notice: Callable[[str], None], codes: bool = False) -> None:
    """Compile what `device` lacks before anything else is done, and say so. The compiler's processes would look like
    those of other users to what measures this machine. Without a compiler nothing is said: the operators' user does."""
    build = _build_for(device, codes)
    if build is None:
        return
    told = OperatorsBuild(build, notice, COMPILING_FIRST)
    try:
        told.look()
        build.wait()
        told.look()
    finally:
        build.stop()


def _build_for(device: str, codes: bool) -> BackgroundBuild | None:
    try:
        return BackgroundBuild.needed(codes=codes) if device == "cpu" else None
    except NoCompiler:
        return None  # the engine says what that means: it may do without, or not
