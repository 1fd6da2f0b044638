"""What a record says of where it was made: machine, driver, versions, date, command, state of the source."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from batchinfer import __version__
from batchinfer.machine.hardware import cpu_cores, cpu_name
from batchinfer.machine.memory import total_memory

PACKAGES = ("torch", "triton", "transformers", "numpy", "pyarrow", "flashinfer-python")
_GPU_FIELDS = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.mem")
_SOURCES = ("batchinfer", "kernels", "tests/gpu_suite")


def describe(root: Path, rehearsal: bool) -> dict[str, Any]:
    """Plain values; None for what this machine does not tell."""
    return {
        "format": 1,
        "rehearsal": rehearsal,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, "-m", "tests.gpu_suite", *sys.argv[1:]]),
        "gpu": None if rehearsal else _gpu(),
        "cpu": {"name": cpu_name(), "cores": cpu_cores(), "memory_bytes": total_memory()},
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"batchinfer": __version__, **{name: _version(name) for name in PACKAGES}},
        "git": _git(root),
        "sources_sha256": sources_digest(root),
    }


def sources_digest(root: Path) -> str:
    """Of all Python and C files of both packages and this suite: names a record's source where git is not at hand."""
    digest = hashlib.sha256()
    files = (p for folder in _SOURCES for p in (root / folder).rglob("*") if p.suffix in (".py", ".c", ".h"))
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _gpu() -> dict[str, Any] | None:
    """The first GPU that torch may use, as its driver describes it."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    text = _output([*query, "-i", visible or "0"])
    if not text:
        return None
    values = [value.strip() for value in text.splitlines()[0].split(",")]
    return dict(zip((name.replace(".", "_") for name in _GPU_FIELDS), values, strict=True))


def _git(root: Path) -> dict[str, Any] | None:
    commit = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    if not commit:
        return None
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--", *_SOURCES])
    return {"commit": commit, "sources_changed": bool(changed)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(command: list[str]) -> str | None:
    """What a command prints; None where there is no such command, or where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
