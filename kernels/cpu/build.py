"""Compiles the C operators for this very CPU, once, with the system's compiler: as many source files at a time as there
are cores."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import IO

from batchinfer_kernels.cpu.compilers import TIMEOUT_S, Compilers, NoCompiler
from batchinfer_kernels.tiles import OPTIONS, TileWay, tile_grant

FOLDER = Path(__file__).parent
Sources = tuple[Path, ...]
# The longest first, so that none is left to run alone at the end.
SOURCES = tuple(
    FOLDER / name
    for name in ("attention_float32.c", "attention_bfloat16.c", "float32.c", "bfloat16.c", "shared.c")
)
CODES = tuple(FOLDER / name for name in ("codes_bfloat16.c", "codes_float32.c"))  # for a cache of codes
# Not -ffast-math: it would assume that no NaN exists, which is how broken weights show, older compilers would make the
# whole process flush denormals, and sums in another order for other numbers of rows would make a row's bits depend on
# its neighbours. No contraction but where the code says so (`fused` in vector.h), for the same reason.
# Before it gives registers out, GCC for Arm moves loads so far ahead that sums no longer fit the 32.
ARM_FLAGS = ("-fno-schedule-insns",)
FLAGS = (
    "-O3",
    # What this CPU has, which is named otherwise on aarch64, where clang does not know the other
    *(("-mcpu=native", *ARM_FLAGS) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)),
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-std=gnu11",
    "-fPIC",
)
LOOK_S = 0.05  # how often to look whether another process has done building


def load_library(
    cache: Path | None = None, tiles: TileWay | None = None, sources: Sources | None = None
) -> ctypes.CDLL:
    """The compiled operators, built at first use and kept in `cache` by compiler, CPU, flags and source. `tiles`: what
    products are computed in; None: the CPU's matrix tiles, if the system grants them. `sources`: of which library, if
    not of the one that SOURCES make.

    torch must have been imported: then both share one OpenMP runtime. Raises NoCompiler.
    """
    library = build_library(cache, tiles=tiles, sources=sources)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoCompiler(f"{library} was built and cannot be loaded: {error}") from error


def build_library(
    cache: Path | None = None,
    compilers: Compilers | None = None,
    tiles: TileWay | None = None,
    sources: Sources | None = None,
) -> Path:
    """The file of the library, compiled if it is not there. Processes that build it at once wait for the first of them.
    Raises NoCompiler."""
    library = library_path(cache, tiles, sources)
    if not is_built(library):
        compilers = compilers or Compilers()
        with _alone(library, compilers):
            if not is_built(library):
                _compile(library, compilers, _flags(tiles), sources or SOURCES)
    return library


def is_built(library: Path) -> bool:
    """Whether the file is there. Raises NoCompiler where its folder may not be looked into."""
    try:
        return library.exists()
    except OSError as error:
        raise NoCompiler(f"{library} cannot be read: {error}") from error


def library_path(
    cache: Path | None = None, tiles: TileWay | None = None, sources: Sources | None = None
) -> Path:
    """Where the library is kept, whether it is there or not. Raises NoCompiler."""
    return (
        cache or cache_folder()
    ) / f"ops-{_fingerprint(_compiler(), _flags(tiles), sources or SOURCES)}.so"


def cache_folder() -> Path:
    """Return the folder in which libraries are kept: `${XDG_CACHE_HOME:-~/.cache}/batchinfer/kernels`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "batchinfer" / "kernels"


def _flags(tiles: TileWay | None) -> tuple[str, ...]:
    return *FLAGS, *OPTIONS[tiles or tile_grant().way]


def _compiler() -> str:
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise NoCompiler("no C compiler (cc, gcc or clang) is installed")
    return found


@contextmanager
def _alone(library: Path, compilers: Compilers) -> Iterator[None]:
    """While it lasts, no other process compiles this library; but where the lock cannot be had, because it is another
    user's or its holder was stopped, each builds for itself. Raises NoCompiler."""
    try:
        for place in reversed((library.parent, *library.parent.parents)):
            if not place.exists():  # `parents=True` would give those above 0777 under an umask of 0
                place.mkdir(exist_ok=True, mode=0o700)
        with _lock_file(library.with_suffix(".lock")) as lock:
            until = time.monotonic() + TIMEOUT_S
            while lock is not None and not _locked(lock) and time.monotonic() < until:
                compilers.check()
                time.sleep(LOOK_S)
            yield
    except OSError as error:
        raise NoCompiler(f"{library} cannot be built: {error}") from error


def _lock_file(path: Path) -> AbstractContextManager[IO[str] | None]:
    try:
        return path.open("w")
    except OSError:
        return nullcontext()


def _locked(lock: IO[str]) -> bool:
    """Whether nobody else holds it; also where the file system has no locks: then each process builds for itself."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR)
    return True


def _compile(library: Path, compilers: Compilers, flags: tuple[str, ...], sources: Sources) -> None:
    """Build aside, then rename: a build that was cut short is never loaded."""
    command = (_compiler(), *flags)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        units = [(*command, "-c", str(s), "-o", str(o)) for s, o in zip(sources, objects, strict=True)]
        with ThreadPoolExecutor(_cores()) as pool:
            list(pool.map(compilers.call, units))
        built = Path(folder) / library.name
        compilers.call((*command, "-shared", *map(str, objects), "-o", str(built), "-lm"))
        os.replace(built, library)


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _fingerprint(compiler: str, flags: tuple[str, ...], of: Sources) -> str:
    """Return a digest of all that the library depends on: `-march=native` makes it good for this kind of CPU alone."""
    version = Compilers().call((compiler, "--version"))
    sources = [path.read_text() for path in (*of, *sorted(FOLDER.glob("*.h")))]
    parts = (*sources, *flags, compiler, version, platform.machine(), _cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """Model and instruction sets of the CPU."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    lines = path.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(names))
