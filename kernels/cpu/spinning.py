"""How long threads of a team that wait for one another spin before they sleep.

GNU's OpenMP spins for milliseconds by default. On a quiet machine that is right: waking a thread that sleeps takes
longer than most waits. Where other processes want the cores it is wrong: a thread that spins keeps a core from the
one that it waits for. The runtime reads its spin count once, when it is loaded, but spins 300 times less whenever it
has more threads than there are cores (GOMP_SPINCOUNT in the manual of GCC's libgomp). So spins are shortened by giving
it more threads: a second team, asleep for as long as it exists.
"""

from __future__ import annotations

import ctypes
import os
import threading

_RUNTIME = "libgomp.so.1"  # by this name the one that torch has loaded is found
START_S = 10.0


class Spinning:
    """Switches between long and short spins. Does nothing where torch came without GNU's OpenMP."""

    def __init__(self) -> None:
        self._runtime = _loaded_runtime()
        self._end: threading.Event | None = None
        self._holder: threading.Thread | None = None

    @property
    def short(self) -> bool:
        """Whether spins are short now."""
        return self._end is not None

    def shorten(self) -> None:
        """Spin shortly from now on."""
        if self._end is not None or self._runtime is None:
            return
        ready, self._end = threading.Event(), threading.Event()
        self._holder = threading.Thread(
            target=_hold_team, args=(self._runtime, ready, self._end), name="spinning", daemon=True
        )
        self._holder.start()
        ready.wait(START_S)

    def lengthen(self) -> None:
        """Spin as long as the runtime does by itself."""
        if self._end is None or self._holder is None:
            return
        self._end.set()
        self._holder.join()
        self._end = self._holder = None


def _hold_team(runtime: ctypes.CDLL, ready: threading.Event, end: threading.Event) -> None:
    """One thread more than there are cores joins this one's team, does nothing, and sleeps until this one ends."""
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL) does nothing
    runtime.GOMP_parallel(nothing, None, runtime.omp_get_num_procs() + 1, 0)
    ready.set()
    end.wait()


def _loaded_runtime() -> ctypes.CDLL | None:
    """GNU's OpenMP, if this process has it already: a second copy would have no say over torch's threads."""
    noload = getattr(os, "RTLD_NOLOAD", None)
    if noload is None:
        return None
    try:
        runtime = ctypes.CDLL(_RUNTIME, mode=noload | os.RTLD_NOW)
    except OSError:
        return None
    runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    runtime.GOMP_parallel.restype = None
    return runtime
