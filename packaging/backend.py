"""Setuptools as the build backend, which builds wheels in a temporary folder.

Setuptools itself would leave `build/` in the clone, and the next wheel would hold files of it that have been deleted
since.
"""

from __future__ import annotations

from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build a wheel, as PEP 517 asks for it."""
    given = dict(config_settings or {})
    options = given.get("--build-option") or []
    with TemporaryDirectory(prefix="batchinfer-build-") as folder:
        moved = ["--bdist-dir", f"{folder}/bdist", "build", "--build-base", folder]
        given["--build-option"] = [*([options] if isinstance(options, str) else options), *moved]
        name: str = build_meta.build_wheel(wheel_directory, given, metadata_directory)
    return name
