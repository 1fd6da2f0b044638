"""What an installation holds: every package of ours, and the data that they need."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
MODEL = "batchinfer.quickstart_model"


def test_every_package_is_installed() -> None:
    found = {MODEL}
    for folder, name in (("batchinfer", "batchinfer"), ("kernels", "batchinfer_kernels")):
        for file in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *file.parent.relative_to(ROOT / folder).parts]))
    assert set(SETTINGS["packages"]) == found


def test_all_data_is_installed() -> None:
    folders = {name: ROOT / folder for name, folder in SETTINGS["package-dir"].items()}
    for name, patterns in SETTINGS["package-data"].items():
        data = [
            path.relative_to(folders[name])
            for path in folders[name].rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc")
        ]
        assert data
        assert [path for path in data if not any(fnmatch(str(path), pattern) for pattern in patterns)] == []
