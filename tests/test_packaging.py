"""What an installation holds: every package of ours, and the data that they need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
MODEL = "batchinfer.quickstart_model"
NEEDED = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "packaging",
    ".editable",
    "batchinfer",
    "kernels",
)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a build reads, links as links."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*NEEDED, "jobs/quickstart/model"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / "clone" / name, symlinks=True, ignore=ignored)
        else:
            (tmp_path / "clone").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "clone" / name)
    return tmp_path / "clone"


def built(clone: Path, kind: str) -> Path:
    """The file that the build backend makes of the clone, as pip calls it."""
    out = clone.parent / kind
    out.mkdir()
    script = f"import backend; backend.build_{kind}({str(out)!r})"
    env = {**os.environ, "PYTHONPATH": str(clone / "packaging")}
    subprocess.run([sys.executable, "-c", script], cwd=clone, env=env, check=True, capture_output=True)
    (file,) = out.iterdir()
    return file


def test_a_wheel_holds_everything_and_leaves_nothing_in_the_clone(clone: Path) -> None:
    with ZipFile(built(clone, "wheel")) as wheel:
        names = set(wheel.namelist())
    assert {
        f"batchinfer/quickstart_model/{file.name}" for file in (ROOT / "jobs/quickstart/model").iterdir()
    } < names
    assert {"batchinfer/py.typed", "batchinfer_kernels/cost.py", "batchinfer_kernels/cpu/float32.c"} < names
    assert {path.split("/")[0] for path in names} >= {"batchinfer", "batchinfer_kernels"}
    assert not (clone / "build").exists()


def editable_path(clone: Path) -> Path:
    """The folder that an editable installation puts on the path."""
    with ZipFile(built(clone, "editable")) as wheel:
        (pth,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        return Path(wheel.read(pth).decode().strip())


def test_an_editable_installation_is_a_folder_with_both_packages(clone: Path) -> None:
    """Type checkers look into folders on the path, and run none of the code that finds packages elsewhere."""
    folder = editable_path(clone)
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".egg-info") == [
        "batchinfer",
        "batchinfer_kernels",
    ]
    assert (folder / "batchinfer" / "py.typed").is_file()
    script = "import batchinfer, batchinfer_kernels.cost, batchinfer.starter as s; assert s._SHIPPED.is_dir()"
    env = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, "-c", script], cwd=clone.parent, env=env, check=True)


@pytest.mark.slow
def test_mypy_knows_the_types_of_an_editable_installation(clone: Path) -> None:
    (clone.parent / "user.py").write_text("import batchinfer\nbatchinfer.run(3)\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--cache-dir=cache",
        "user.py",
    ]
    env = {**os.environ, "MYPYPATH": "", "PYTHONPATH": str(editable_path(clone))}
    told = subprocess.run(command, cwd=clone.parent, env=env, capture_output=True, text=True, check=False)
    assert 'Argument 1 to "run" has incompatible type "int"' in told.stdout
    assert "import-untyped" not in told.stdout


def test_every_package_is_installed() -> None:
    found = {MODEL}
    for folder, name in (("batchinfer", "batchinfer"), ("kernels", "batchinfer_kernels")):
        for file in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *file.parent.relative_to(ROOT / folder).parts]))
    assert set(SETTINGS["packages"]) == found


def test_all_data_is_installed() -> None:
    links = ROOT / SETTINGS["package-dir"][""]
    folders = {name: links.joinpath(*name.split(".")) for name in SETTINGS["packages"]}
    for name, patterns in SETTINGS["package-data"].items():
        data = [
            path.relative_to(folders[name].resolve())
            for path in folders[name].resolve().rglob("*")
            if path.is_file() and path.suffix not in (".py", ".pyc")
        ]
        assert data
        assert [path for path in data if not any(fnmatch(str(path), pattern) for pattern in patterns)] == []
