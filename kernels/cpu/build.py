"""Compiles the C operators for this very CPU, once, with the system's compiler: a process for each source file."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).parent
# The two dtypes take the same time: together, on two cores, half of what one file with both takes.
SOURCES = tuple(FOLDER / name for name in ("float32.c", "bfloat16.c", "shared.c"))
# Not -ffast-math: it would assume that no NaN exists, which is how broken weights show, older compilers would make the
# whole process flush denormals, and sums in another order for other numbers of rows would make a row's bits depend on
# its neighbours. No contraction but where the code says so (`fused` in vector.h), for the same reason.
FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-std=gnu11",
    "-fPIC",
)
TIMEOUT_S = 300  # it takes half a minute on two idle cores, and several processes may build at once


class NoCompiler(RuntimeError):
    """There is no C compiler here, or it cannot build the operators; says which and why."""


def load_library(cache: Path | None = None, options: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The compiled operators, built at first use and kept in `cache` by compiler, CPU, flags and source. `options` are
    flags beside those above.

    torch must have been imported: then both share one OpenMP runtime. Raises NoCompiler.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompiler("no C compiler (cc, gcc or clang) is installed")
    folder = cache or cache_folder()
    library = folder / f"ops-{_fingerprint(compiler, options)}.so"
    if not library.exists():
        _compile(compiler, library, options)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NoCompiler(f"{library} was built and cannot be loaded: {error}") from error


def cache_folder() -> Path:
    """`${XDG_CACHE_HOME:-~/.cache}/batchinfer/kernels`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "batchinfer" / "kernels"


def _compile(compiler: str, library: Path, options: tuple[str, ...]) -> None:
    """Build aside, then rename: a build that was cut short is never loaded."""
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            objects = [Path(folder) / f"{source.stem}.o" for source in SOURCES]
            units = [
                (compiler, *options, "-c", str(s), "-o", str(o))
                for s, o in zip(SOURCES, objects, strict=True)
            ]
            with ThreadPoolExecutor(len(units)) as pool:
                list(pool.map(_call, units))
            built = Path(folder) / library.name
            _call((compiler, "-shared", *map(str, objects), "-o", str(built), "-lm"))
            os.replace(built, library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{compiler} cannot build the operators: {error}") from error


def _call(command: tuple[str, ...]) -> None:
    """Run the compiler with our flags and these arguments."""
    compiler, *arguments = command
    done = subprocess.run(
        [compiler, *FLAGS, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise NoCompiler(f"{compiler} cannot build the operators: {done.stderr.strip()[:500]}")


def _fingerprint(compiler: str, options: tuple[str, ...]) -> str:
    """What the library depends on: `-march=native` makes it good for this kind of CPU alone."""
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{compiler} does not run: {error}") from error
    sources = [path.read_text() for path in (*SOURCES, *sorted(FOLDER.glob("*.h")))]
    parts = (*sources, *FLAGS, *options, compiler, version, platform.machine(), _cpu())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _cpu() -> str:
    """Model and instruction sets of the CPU."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor()
    names = ("model name", "flags", "Features", "CPU part")
    lines = path.read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(names))
