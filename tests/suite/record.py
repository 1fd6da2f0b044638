"""The record of a run: machine, driver, versions, date, command, state of the source, and measurements."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from batchinfer.core.version import __version__
from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.hardware import cpu_name
from batchinfer.machine.memory import total_memory
from tests.suite.shares import with_shares

PACKAGES = ("torch", "triton", "transformers", "numpy", "pyarrow", "flashinfer-python", "flash-attn-4")
_GPU_FIELDS = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.mem")
_SOURCES = ("batchinfer", "kernels", "tests/gpu_suite", "tests/speed", "tests/suite")


def described(root: Path, rehearsal: bool) -> dict[str, Any]:
    """Return where and when a record is made, with None for unknown values."""
    return {
        "format": 2,
        "rehearsal": rehearsal,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
        "gpu": None if rehearsal else _gpu(),
        "cpu": {"name": cpu_name(), "cores": usable_cpus(), "memory_bytes": total_memory()},
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"batchinfer": __version__, **{name: _version(name) for name in PACKAGES}},
        "git": _git(root),
        "sources_sha256": sources_digest(root),
    }


def peaks_of(record: dict[str, Any]) -> dict[str, float]:
    """Return the better peaks of the measurements before and after, as a shared machine is slow at times."""
    best: dict[str, float] = {}
    for section in record["sections"]:
        for result in section["results"] if section["name"].startswith("peaks") else ():
            for name, value in result["metrics"].items():
                best[name] = max(value, best.get(name, 0.0))
    return best


class Keeper:
    """Writes the record to a file after each addition: measurements survive a crash."""

    def __init__(self, folder: Path, call: str | None = None) -> None:
        self._folder, self._suffix = folder, "" if call is None else f"-{call}"
        self.path: Path | None = None

    def keep(self, record: dict[str, Any]) -> None:
        if self.path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.path = self._folder / f"{record_name(record)}{self._suffix}.json"
        text = json.dumps(with_shares(record, peaks_of(record)), indent=1, ensure_ascii=False)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text + "\n", "utf-8")
        os.replace(temporary, self.path)


def record_name(record: dict[str, Any]) -> str:
    """Return date, time (UTC), and GPU or CPU: `2026-11-21-1730-nvidia-h100-80gb-hbm3`."""
    at = str(record["measured_at"])
    device = "rehearsal" if record["rehearsal"] else (record["gpu"] or record["cpu"])["name"]
    return f"{at[:10]}-{at[11:13]}{at[14:16]}-{re.sub('[^a-z0-9]+', '-', str(device).lower()).strip('-')}"


def sources_digest(root: Path) -> str:
    """Return the digest of all Python and C files of both packages and the suite.

    It identifies a source without git.
    """
    digest = hashlib.sha256()
    files = (p for folder in _SOURCES for p in (root / folder).rglob("*") if p.suffix in (".py", ".c", ".h"))
    for path in sorted(files):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _gpu() -> dict[str, Any] | None:
    """Return the first GPU that torch may use, as its driver describes it."""
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
    """Return the output of a command, or None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
