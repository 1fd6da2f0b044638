"""Tests the content of an installation: all our packages and their data."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from batchinfer.core.version import __version__
from batchinfer.machine import doctor
from batchinfer.machine.doctor import Fact
from batchinfer.report.tables.tables import versions

ROOT = Path(__file__).parent.parent
NEEDED = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    ".editable",
    "batchinfer",
    "kernels",
)


def test_no_other_projects_name_or_version_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI has another project named `batchinfer`, whose version must not be used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["dynamic"]) == ("batchinfer-engine", ["version"])
    monkeypatch.setattr(doctor, "version", lambda _: "a stranger's")
    assert Fact("batchinfer", __version__) in doctor.doctor()
    assert versions()["batchinfer"] == __version__


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with the files that a build reads; links stay links."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*NEEDED, "jobs/quickstart/model"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / "clone" / name, symlinks=True, ignore=ignored)
        else:
            (tmp_path / "clone").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "clone" / name)
    return tmp_path / "clone"


def built(clone: Path, kind: str) -> Path:
    """Return the file that the build backend makes from the clone, as pip calls it."""
    out = clone.parent / kind
    out.mkdir()
    script = f"from hatchling import build; build.build_{kind}({str(out)!r})"
    subprocess.run([sys.executable, "-c", script], cwd=clone, check=True, capture_output=True)
    (file,) = out.iterdir()
    return file


def sources() -> set[str]:
    """Return every file of both packages by its installed name."""
    found = set()
    for folder, name in (("batchinfer", "batchinfer"), ("kernels", "batchinfer_kernels")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found.add(f"{name}/{path.relative_to(ROOT / folder)}")
    model = (ROOT / "jobs/quickstart/model").iterdir()
    return found | {f"batchinfer/quickstart_model/{file.name}" for file in model}


def test_a_wheel_holds_everything_and_leaves_nothing_in_the_clone(clone: Path) -> None:
    before = {path.name for path in clone.iterdir()}
    with ZipFile(built(clone, "wheel")) as wheel:
        stored = set(wheel.namelist())
    names = {name for name in stored if ".dist-info/" not in name}
    assert f"batchinfer_engine-{__version__}.dist-info/METADATA" in stored
    assert names == sources()
    assert "batchinfer_kernels/cpu/float32.c" in names
    assert {path.name for path in clone.iterdir()} == before


def editable_path(clone: Path) -> Path:
    """Return the folder that an editable installation puts on the path."""
    with ZipFile(built(clone, "editable")) as wheel:
        (pth,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        return Path(wheel.read(pth).decode().strip())


@pytest.mark.slow
def test_an_editable_installation_is_a_folder_with_both_packages(clone: Path) -> None:
    """Type checkers search folders on the path, and run no code that finds packages elsewhere."""
    folder = editable_path(clone)
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".egg-info") == [
        "batchinfer",
        "batchinfer_kernels",
    ]
    assert (folder / "batchinfer" / "py.typed").is_file()
    script = (
        "import batchinfer, batchinfer_kernels.cost, batchinfer.verbs.starter as s; assert s._shipped_model()"
    )
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
