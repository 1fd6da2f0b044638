"""Compiles the C operators for this CPU once, with the system's compiler, one source file per core at a time."""

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
# The slowest to compile first, which balances the cores
SOURCES = tuple(
    FOLDER / name
    for name in ("attention_float32.c", "attention_bfloat16.c", "float32.c", "bfloat16.c", "shared.c")
)
CODES = tuple(FOLDER / name for name in ("codes_bfloat16.c", "codes_float32.c"))  # for a quantised cache
# Not -ffast-math. It assumes that no NaN exists, but NaN is how broken weights are detected. With older compilers it
# makes the whole process flush denormals. It also reorders sums, which would make a row's bits depend on the batch;
# -ffp-contract=off is for the same reason: only `fused` in vector.h contracts
# -fno-schedule-insns: GCC for Arm would move loads so far ahead that the sums exceed the 32 registers
ARM_FLAGS = ("-fno-schedule-insns",)
FLAGS = (
    "-O3",
    # Both mean all instruction sets of this CPU; clang on aarch64 does not support -march=native
    *(("-mcpu=native", *ARM_FLAGS) if platform.machine() in ("aarch64", "arm64") else ("-march=native",)),
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-std=gnu11",
    "-fPIC",
)
LOOK_S = 0.05  # seconds between checks whether another process finished the build


def load_library(
    cache: Path | None = None, tiles: TileWay | None = None, sources: Sources | None = None
) -> ctypes.CDLL:
    """Load a library of compiled CPU operators, and build it first if it does not exist.

    torch must be imported before, so that the library and torch share one OpenMP runtime.

    Args:
        cache: folder of the libraries, `cache_folder()` by default.
        tiles: CPU instructions for matrix products. None: AMX tiles if the system permits them.
        sources: source files of the library, SOURCES by default.

    Raises:
        NoCompiler: If the library cannot be built or loaded.
    """
    library = build_library(cache, tiles=tiles, sources=sources)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoCompiler(f"{library} was built but cannot be loaded: {error}") from error


def build_library(
    cache: Path | None = None,
    compilers: Compilers | None = None,
    tiles: TileWay | None = None,
    sources: Sources | None = None,
) -> Path:
    """Return the path of a library of CPU operators, and compile it if it does not exist.

    If several processes need the library at once, the first builds it and the others wait.

    Args:
        cache: folder of the libraries, `cache_folder()` by default.
        compilers: runs the compiler, and lets another thread stop it. None: the build cannot be stopped.
        tiles: CPU instructions for matrix products. None: AMX tiles if the system permits them.
        sources: source files of the library, SOURCES by default.

    Raises:
        NoCompiler: If the library cannot be built.
    """
    library = library_path(cache, tiles, sources)
    if not is_built(library):
        compilers = compilers or Compilers()
        with _alone(library, compilers):
            if not is_built(library):
                _compile(library, compilers, _flags(tiles), sources or SOURCES)
    return library


def is_built(library: Path) -> bool:
    """Return True if the library file exists. Raises NoCompiler if its folder cannot be read."""
    try:
        return library.exists()
    except OSError as error:
        raise NoCompiler(f"{library} cannot be read: {error}") from error


def library_path(
    cache: Path | None = None, tiles: TileWay | None = None, sources: Sources | None = None
) -> Path:
    """Return the path of a library of CPU operators, which may not exist yet.

    The file name is derived from the compiler, its flags, the sources and the CPU.

    Args:
        cache: folder of the libraries, `cache_folder()` by default.
        tiles: CPU instructions for matrix products. None: AMX tiles if the system permits them.
        sources: source files of the library, SOURCES by default.

    Raises:
        NoCompiler: If there is no C compiler.
    """
    return (
        cache or cache_folder()
    ) / f"ops-{_fingerprint(_compiler(), _flags(tiles), sources or SOURCES)}.so"


def cache_folder() -> Path:
    """Return the default folder of the compiled CPU operators: `${XDG_CACHE_HOME:-~/.cache}/batchinfer/kernels`."""
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
    # Another user may own the lock file, or its holder may be suspended: after a time, build without the lock
    try:
        for place in reversed((library.parent, *library.parent.parents)):
            if not place.exists():  # mkdir(parents=True) would ignore `mode` for the parents
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
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EINTR)
    return True


def _compile(library: Path, compilers: Compilers, flags: tuple[str, ...], sources: Sources) -> None:
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
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _fingerprint(compiler: str, flags: tuple[str, ...], of: Sources) -> str:
    version = Compilers().call((compiler, "--version"))
    sources = [path.read_text() for path in (*of, *sorted(FOLDER.glob("*.h")))]
    parts = (*sources, *flags, compiler, version, platform.machine(), _cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    lines = path.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(names))
