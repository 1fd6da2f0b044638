"""The facts that a process of batchinfer says about itself, so that engines on several machines compute alike."""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from batchinfer.core.version import __version__

# By the names under which they are told to people; values are texts
_COMPARED = ("batchinfer", "torch", "Python", "processor")


def about_this() -> dict[str, str]:
    """Return the versions of what computes here, and the machine's name."""
    major, minor, _ = platform.python_version_tuple()
    return {
        "batchinfer": __version__,
        "torch": version("torch"),
        "Python": f"{major}.{minor}",
        "processor": platform.machine(),
        "host": socket.gethostname(),
    }


def differing(run: Mapping[str, Any], node: Mapping[str, Any]) -> str:
    """Say in words what of a node is not as at the run's machine; "": it may compute with it."""
    found = (
        f"{name} {node.get(name)}, and {run[name]} where the job runs"
        for name in _COMPARED
        if node.get(name) != run[name]
    )
    return "; ".join(found)
