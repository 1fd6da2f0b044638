"""Compiles the CPU operators on a machine's first run, usually while the input is read and planned."""

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
    """Tells the user about a compilation of CPU operators in the background, and measures it."""

    def __init__(
        self, build: BackgroundBuild | None, notice: Callable[[str], None], line: str = COMPILING
    ) -> None:
        """Create an object that reports on a compilation.

        Args:
            build: The compilation. None if all operators were compiled before.
            notice: Called with lines for the user.
            line: The notice at the start of the compilation.
        """
        self._build, self._notice, self._line = build, notice, line
        self._announced = self._announced_end = build is None
        self._needed_at: float | None = None

    def mark_needed(self) -> None:
        """Record that an engine needs the operators from now on. The time until they are ready counts as waiting."""
        self._needed_at = time.monotonic()
        self.notify_progress()

    def notify_progress(self) -> None:
        """Notify the user once that operators are being compiled, and once that they are ready.

        A failed compilation causes no notice, because the engine reports it.
        """
        if not self._announced and self._build is not None and self._build.error is None:
            self._announced = True
            self._notice(self._line)
        if self._took is not None and not self._announced_end:
            self._announced_end = True
            self._notice(f"compiled the CPU operators in {self._took:.1f} s")

    @property
    def facts(self) -> dict[str, float]:
        """Return the seconds of compiling and of waiting for it, by column of the run table.

        Empty if nothing was compiled, the compilation has not ended, or no engine needed the operators.
        """
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
def build_in_background(
    numerics: Numerics, notice: Callable[[str], None], ours: bool = True
) -> Iterator[OperatorsBuild]:
    """Compile missing CPU operators in the background. The compilation is stopped at the end of the block.

    Yields an object that reports the progress of the compilation.

    Args:
        numerics: The arithmetic of the run. Only the device "cpu" has operators to compile.
        notice: Called with lines for the user.
        ours: Whether the engine runs on this machine and uses batchinfer's operators. If False, nothing is compiled.
    """
    build = _build_for(numerics.device, numerics.kv_cache == "int8") if ours else None
    try:
        yield OperatorsBuild(build, notice)
    finally:
        if build is not None:
            build.stop()


def build_operators(device: str, notice: Callable[[str], None], codes: bool = False) -> None:
    """Compile missing CPU operators, and wait until they are ready. Does nothing on a GPU or without a compiler.

    Args:
        device: The device of the engine: "cpu" or "cuda".
        notice: Called with lines for the user.
        codes: Whether the KV cache is int8, which needs further operators.
    """
    build = _build_for(device, codes)
    if build is None:
        return
    report = OperatorsBuild(build, notice, COMPILING_FIRST)
    try:
        report.notify_progress()
        build.wait()
        report.notify_progress()
    finally:
        build.stop()


def _build_for(device: str, codes: bool) -> BackgroundBuild | None:
    try:
        return BackgroundBuild.needed(codes=codes) if device == "cpu" else None
    except NoCompiler:
        return None  # the engine falls back to other operators, or reports the missing compiler
