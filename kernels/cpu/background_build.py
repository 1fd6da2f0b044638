"""The operators compiled while the process does something else."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from batchinfer_kernels.cpu.build import CODES, SOURCES, Sources, build_library, is_built, library_path
from batchinfer_kernels.cpu.compilers import Compilers, NoCompiler


class BackgroundBuild:
    """A thread that compiles the operators. Whoever loads them meanwhile, in whichever process, waits for it."""

    def __init__(self, cache: Path | None = None, codes: bool = False) -> None:
        """codes: with the operators for a cache of codes."""
        self._cache, self._compilers, self._libraries = cache, Compilers(), _libraries(codes)
        self.began = time.monotonic()
        self.ended: float | None = None  # when the library was there, on the clock of `began`
        self.error: NoCompiler | None = None  # why it will not be there
        self._thread = threading.Thread(target=self._build, daemon=True, name="compiling operators")
        self._thread.start()

    @classmethod
    def needed(cls, cache: Path | None = None, codes: bool = False) -> BackgroundBuild | None:
        """None where all is there. Raises NoCompiler."""
        paths = [library_path(cache, sources=sources) for sources in _libraries(codes)]
        return None if all(map(is_built, paths)) else cls(cache, codes)

    def wait(self) -> None:
        """Until the library is there, or `error` says why it will not be."""
        self._thread.join()

    def stop(self) -> None:
        """End it, done or not."""
        self._compilers.stop()
        self._thread.join()

    def _build(self) -> None:
        try:
            for sources in self._libraries:
                build_library(self._cache, self._compilers, sources=sources)
            self.ended = time.monotonic()
        except NoCompiler as error:
            self.error = error


def _libraries(codes: bool) -> tuple[Sources, ...]:
    return (SOURCES, CODES) if codes else (SOURCES,)
