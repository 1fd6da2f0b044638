"""C sources of tests, compiled against the operators' headers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from batchinfer_kernels.cpu import build

HERE = Path(__file__).parent


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert found is not None, "the operators need a C compiler, and so do their tests"
    return found


def compiled_unit(source: str, folder: Path, *options: str) -> Path:
    """Compile one source next to this file with the operators' flags and `options`; return the shared library."""
    library = folder / f"{Path(source).stem}.so"
    _compile(source, *options, "-Wall", "-Wextra", "-Werror", "-shared", "-o", str(library), "-lm")
    return library


def assembled(source: str, *options: str) -> str:
    """Return the assembly that the compiler produces."""
    return _compile(source, *options, "-S", "-o", "-")


def _compile(source: str, *options: str) -> str:
    command = [compiler(), *build.FLAGS, "-I", str(build.FOLDER), str(HERE / source), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
