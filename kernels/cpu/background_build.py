"""Compiles the operators in a background thread."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from batchinfer_kernels.cpu.build import CODES, SOURCES, Sources, build_library, is_built, library_path
from batchinfer_kernels.cpu.compilers import Compilers, NoCompiler


class BackgroundBuild:
    """A thread that compiles the CPU operators in the background.

    If a process loads the operators before the build ends, it waits for the build.
    """

    def __init__(self, cache: Path | None = None, codes: bool = False) -> None:
        """Start the build in a thread.

        Args:
            cache: folder for the libraries, `cache_folder()` by default.
            codes: True to build the operators for a quantised cache too.
        """
        self._cache, self._compilers, self._libraries = cache, Compilers(), _libraries(codes)
        self.began = time.monotonic()
        self.ended: float | None = None  # time.monotonic() when all libraries were built
        self.error: NoCompiler | None = None  # why the build failed
        self._thread = threading.Thread(target=self._build, daemon=True, name="compiling operators")
        self._thread.start()

    @classmethod
    def needed(cls, cache: Path | None = None, codes: bool = False) -> BackgroundBuild | None:
        """Start a build in a thread and return it, or return None if all libraries exist.

        Args:
            cache: folder for the libraries, `cache_folder()` by default.
            codes: True to build the operators for a quantised cache too.

        Raises:
            NoCompiler: If there is no C compiler, or the folder cannot be read.
        """
        paths = [library_path(cache, sources=sources) for sources in _libraries(codes)]
        return None if all(map(is_built, paths)) else cls(cache, codes)

    def wait(self) -> None:
        """Wait until the build ends. Raises nothing if it failed."""
        self._thread.join()

    def stop(self) -> None:
        """Stop the build and wait for the thread to end."""
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
