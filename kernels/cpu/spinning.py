"""Controls how long OpenMP threads spin before they sleep while they wait for each other.

GNU OpenMP spins for milliseconds by default. On an idle machine this is fast, because waking a thread takes longer than
most waits. On a busy machine a spinning thread occupies the core that the awaited thread needs. The runtime reads its
spin count once, when it is loaded, but spins 300 times less while it has more threads than cores (GOMP_SPINCOUNT in the
manual of libgomp). A second, sleeping team of threads therefore shortens the spins.
"""

from __future__ import annotations

import ctypes
import os
import threading

_RUNTIME = "libgomp.so.1"  # the name under which torch loads it
START_S = 10.0  # the longest wait for the second team to start


class SpinControl:
    """Switches how long idle OpenMP threads wait actively (spin) before they sleep.

    Does nothing if torch does not use GNU OpenMP.
    """

    def __init__(self) -> None:
        self._runtime = _loaded_runtime()
        self._end: threading.Event | None = None
        self._holder: threading.Thread | None = None

    @property
    def short(self) -> bool:
        """Return True if idle OpenMP threads spin only briefly at present."""
        return self._end is not None

    def shorten(self) -> None:
        """Make idle OpenMP threads spin only briefly, then sleep, from now on."""
        if self._end is not None or self._runtime is None:
            return
        ready, self._end = threading.Event(), threading.Event()
        self._holder = threading.Thread(
            target=_hold_team, args=(self._runtime, ready, self._end), name="spinning", daemon=True
        )
        self._holder.start()
        ready.wait(START_S)

    def lengthen(self) -> None:
        """Restore the default time for which idle OpenMP threads spin before they sleep."""
        if self._end is None or self._holder is None:
            return
        self._end.set()
        self._holder.join()
        self._end = self._holder = None


def _hold_team(runtime: ctypes.CDLL, ready: threading.Event, end: threading.Event) -> None:
    # While a team with more threads than cores exists, GNU OpenMP shortens the spinning of all teams
    nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # free(NULL) is a no-op
    runtime.GOMP_parallel(nothing, None, runtime.omp_get_num_procs() + 1, 0)
    ready.set()
    end.wait()


def _loaded_runtime() -> ctypes.CDLL | None:
    # Only if torch has loaded it: a second copy would not control torch's threads
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
