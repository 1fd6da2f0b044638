"""Fixtures for tests of whole commands: a checkpoint for all jobs, and a folder with a right job."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from batchinfer.machine import garbage, spawning
from tests import warm_commands
from tests.checkpoints import make_model_folder
from tests.examples import everything
from tests.warm_children import WarmChildren, unflushed

if TYPE_CHECKING:
    from tests.batchinfer.wrong_jobs import CliOf, Place

SPAWN = spawning._spawn
READS_ROWS = tuple(str(Path(__file__).parent / room) for room in ("input", "store"))


@cache
def of_jobs(module: str) -> ModuleType | None:
    """Import a module, or return None on a machine with only the dependencies of GPU tests."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template. Tests only change copies."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_model_folder(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Place:
    """A new folder with a job, an input of a few rows and a link to the model."""
    from tests.batchinfer.wrong_jobs import make_place  # the GPU's tests run where what jobs need is missing

    return make_place(tmp_path / "job", model)


@pytest.fixture
def cli_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CliOf:
    """Return a function that makes the command line with an engine."""
    from tests.batchinfer.wrong_jobs import command

    return partial(command, capsys, monkeypatch)


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory, model: Path, warm_children: None) -> Place:
    """A job that has run once on a real engine. Tests may not change it."""
    from tests.batchinfer.measured_run import measured_run

    return measured_run(tmp_path_factory.mktemp("measured"), model)


@pytest.fixture(autouse=True, scope="session")
def warm_children() -> Iterator[None]:
    """Fork the children of jobs and the commands of tests from a warm process, if it is available."""
    with pytest.MonkeyPatch.context() as patch, WarmChildren() as warm:
        if sys.platform == "linux" and not everything():
            patch.setattr(spawning, "_spawn", warm.spawn)
            patch.setattr(warm_commands, "warm", warm)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_disks() -> Iterator[None]:
    """Skip fsync in all tests: no test cuts the power.

    On a busy disk, fsync takes a sixth of a job's time. Tests of the order of writes record the calls of the
    layer above.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not everything():
            patch.setattr(os, "fsync", unflushed)
        yield


@pytest.fixture(autouse=True, scope="session")
def kept_databases() -> Iterator[None]:
    """Take in-memory databases from a pool."""
    with pytest.MonkeyPatch.context() as patch:
        if not everything() and (databases := of_jobs("tests.kept_databases")) is not None:
            databases.keep(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def frozen_garbage() -> Iterator[None]:
    """Keep imported objects frozen: an engine that ends in this process would unfreeze them for all later tests."""
    with pytest.MonkeyPatch.context() as patch:
        if not everything():
            nothing = {name: lambda: None for name in ("collect", "freeze", "unfreeze")}
            patch.setattr(garbage, "gc", SimpleNamespace(**(vars(gc) | nothing)))
        yield


@pytest.fixture
def render_processes() -> None:
    """Use render processes, for tests whose templates may hang or exhaust memory."""


@pytest.fixture(autouse=True)
def _render_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Render rows in threads of this process, except for tests of render processes."""
    own = {"render_processes", "cold_children"} & {*request.fixturenames}
    if own or everything() or str(request.path).startswith(READS_ROWS):
        return
    if (threads := of_jobs("tests.render_threads")) is not None:
        threads.use_threads(monkeypatch)


@pytest.fixture
def cold_children(warm_children: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start children and commands as new interpreters, for tests of their start and end."""
    monkeypatch.setattr(spawning, "_spawn", SPAWN)
    monkeypatch.setattr(warm_commands, "warm", None)
