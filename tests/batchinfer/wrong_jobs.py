"""A folder with a right job, for tests that make one mistake and run the command line on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchinfer import cli
from batchinfer.pipeline import options
from batchinfer.pipeline.workers import standby
from tests.memory_transport import FakeTransport

FAKE = "tests.fake_engine:build"
NO_ENGINE = "tests.there_is_no_such_engine:build"  # a job that starts it ends with 70, which no case expects
SECTIONS = {
    "name": "name: nightly",
    "model": "model: {path: model}",
    "input": "input: {path: rows.jsonl, id: id}",
    "prompt": 'prompt: {user: "Say {{ text }}"}',
    "sampling": "sampling: {max_tokens: 8}",
    "output": "output: {path: out/res, columns: [text]}",
}
ROWS = [{"id": f"r{i}", "text": f"word {i}"} for i in range(20)]


@dataclass(frozen=True)
class Place:
    """The folder of one job. Its methods create files in it; `model` is shared until `own_model`."""

    folder: Path
    shared_model: Path

    def job(self, *extra: str, file: str = "job.yaml", **sections: str) -> Path:
        """Write the job file with these sections replaced, and `extra` lines at the end."""
        lines = [*(SECTIONS | sections).values(), *extra]
        path = self.folder / file
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    def rows(self, *rows: Any, name: str = "rows.jsonl") -> Path:
        """Write a JSONL file; bytes are written unchanged."""
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        return self.bytes(b"".join(line + b"\n" for line in lines), name)

    def bytes(self, data: bytes, name: str = "rows.jsonl") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def own_model(self) -> Path:
        """Return a copy of the checkpoint that may be damaged."""
        link = self.folder / "model"
        link.unlink()
        shutil.copytree(self.shared_model, link)
        return link

    @property
    def results(self) -> Path:
        return self.folder / "out" / "res"

    @property
    def state(self) -> Path:
        return self.folder / "out" / ".batchinfer-res"

    def published(self) -> dict[str, bytes]:
        """Return the contents of the files in the result folder, by name."""
        if not self.results.is_dir():
            return {}
        return {path.name: path.read_bytes() for path in sorted(self.results.iterdir()) if path.is_file()}

    def table(self) -> list[dict[str, Any]]:
        """Return the published rows."""
        files = sorted(self.results.glob("*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]


def make_place(folder: Path, model: Path) -> Place:
    folder.mkdir(parents=True, exist_ok=True)
    place = Place(folder, model)
    (folder / "model").symlink_to(model)
    place.job()
    place.rows(*ROWS)
    return place


@dataclass(frozen=True)
class Ended:
    """The end of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]
CliOf = Callable[..., Command]  # the fixture `cli_of`: `command` for the engine that it is given


def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, engine: str = FAKE
) -> Command:
    """Return a function that runs the command line in this process with another engine."""
    monkeypatch.setattr(
        options, "RunOptions", partial(options.RunOptions, engine=engine, transport=FakeTransport())
    )
    monkeypatch.setattr(
        standby, "usable_cpus", lambda: 1
    )  # no process stands by for an engine that takes none

    def run(*arguments: object) -> Ended:
        capsys.readouterr()
        code = cli._guarded([str(argument) for argument in arguments])
        told = capsys.readouterr()
        return Ended(code, told.out, told.err)

    return run


def clear(message: str) -> None:
    """Check that a message is not empty and shows no internals of Python."""
    first, _, rest = message.partition("\n")
    message = rest if ": reads " in first else message  # the first line of a run, whose job file is right
    assert message.startswith("batchinfer: ")
    for word in ("Traceback", "a bug in", "pydantic", "errors.pydantic", "BatchInferError", "<class"):
        assert word not in message


def flip(path: Path, at: int, mask: int = 0x40) -> None:
    """Flip one bit of a file; a negative position counts from its end."""
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.write_bytes(data)


def children(pid: int) -> Iterator[int]:
    """Yield the descendants of a process."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from children(int(child))


def run_once(place: Place) -> Place:
    """Run the job on the fake engine, for fixtures of many tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            options, "RunOptions", partial(options.RunOptions, engine=FAKE, transport=FakeTransport())
        )
        assert cli._guarded(["run", str(place.folder / "job.yaml"), "-q"]) == 0
    return place


def copy_of(place: Place, folder: Path) -> Place:
    """Return a copy of a place that a test may change."""
    shutil.copytree(place.folder, folder, symlinks=True)
    return Place(folder, place.shared_model)


def alive(pids: Sequence[int]) -> list[int]:
    """Return the processes that still run, without zombies."""
    return [pid for pid in pids if _state(pid) not in ("Z", "X", "")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def hears_signals() -> None:
    """Reset SIGHUP and SIGINT in a child, for `preexec_fn`.

    A child ignores signals that its parent ignores, such as SIGHUP under nohup and SIGINT in a script's
    background job.
    """
    for signum in (signal.SIGHUP, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a child command."""
    root = Path(__file__).parents[2]
    return os.environ | {"PYTHONPATH": str(root)} | more
