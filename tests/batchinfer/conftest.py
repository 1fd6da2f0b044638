"""What tests of whole commands share: a checkpoint that every job may name, and a place with a job that is right."""

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
    """Import a module; None on a machine that has only what the GPU's tests need."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template; tests change copies of it only."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_model_folder(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Place:
    """A folder of its own with a job, an input of a few rows and a link to the model."""
    from tests.batchinfer.wrong_jobs import make_place  # the GPU's tests run where what jobs need is missing

    return make_place(tmp_path / "job", model)


@pytest.fixture
def cli_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CliOf:
    """Make the command line with an engine, for the other arguments of `command`."""
    from tests.batchinfer.wrong_jobs import command

    return partial(command, capsys, monkeypatch)


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory, model: Path, warm_children: None) -> Place:
    """A job that has run once on a real engine; nothing may change it."""
    from tests.batchinfer.measured_run import measured_run

    return measured_run(tmp_path_factory.mktemp("measured"), model)


@pytest.fixture(autouse=True, scope="session")
def warm_children() -> Iterator[None]:
    """Jobs that run in this process start their children fast, and so do tests that start commands. Where it cannot be
    had, they start as they do."""
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
    """For tests whose templates may hang or exhaust memory."""


@pytest.fixture(autouse=True)
def _render_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Render rows in threads of this process, unless the test is about render processes."""
    own = {"render_processes", "cold_children"} & {*request.fixturenames}
    if own or everything() or str(request.path).startswith(READS_ROWS):
        return
    if (threads := of_jobs("tests.render_threads")) is not None:
        threads.use_threads(monkeypatch)


@pytest.fixture
def cold_children(warm_children: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how children start and end, and of children that must not find anything imported; commands are new
    interpreters, too."""
    monkeypatch.setattr(spawning, "_spawn", SPAWN)
    monkeypatch.setattr(warm_commands, "warm", None)
