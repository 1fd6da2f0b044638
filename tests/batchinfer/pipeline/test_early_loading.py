"""The engine loads while the input is read, as soon as a key is missing in the store."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.core.errors import BatchInferError, InputCorrupt, InputMissing, Interrupted
from batchinfer.filesystem.durable import FileOps
from batchinfer.input.chunk import DEFAULT_SIZE
from batchinfer.input.formats.parquet import ParquetReader
from batchinfer.job import load_job
from batchinfer.pipeline.report import Outcome
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers import standby
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.pipeline.workers.messages import Configure, Load, WorkerSpec
from batchinfer.pipeline.workers.standby import EngineStandby
from batchinfer.report.progress import Phase, Progress
from batchinfer.store.results.planned_work import announce_plans
from tests.batchinfer.pipeline.test_pipeline import FAKE, people, run, write_job
from tests.examples import examples
from tests.memory_transport import FakeTransport, FakeWorker, MemoryTransport

BATCH = DEFAULT_SIZE.lines  # rows that are read at once
TWO = ("engine.data_parallel", "2")


class Seen(Progress):
    """Events of a run in order: phases, "512 rows" read, and starts and ends of engines."""

    def __init__(self) -> None:
        super().__init__(None, quiet=True)
        self.events: list[str] = []
        self.hears: Callable[[str], object] = lambda _: None
        self.transport = MemoryTransport(self._started)
        self.interrupts = Interrupts()

    def _started(self, spec: WorkerSpec) -> FakeWorker:
        self.note("open")
        return Watched(spec, self.note)

    def note(self, event: str) -> None:
        self.events.append(event)
        self.hears(event)

    def phase(self, phase: Phase, *total: Any) -> None:
        self.note(phase)
        super().phase(phase, *total)

    def read(self, rows: int, *of_bytes: Any) -> None:
        self.note(f"{rows} rows")
        super().read(rows, *of_bytes)

    def run(self, path: Path, *sets: tuple[str, str], **options: Any) -> Outcome:
        """Run the job. No engine survives, however the run ends."""
        wanted = replace(FAKE, transport=self.transport, **options)
        try:
            with self.interrupts.installed():
                return run_job(load_job(path, sets), wanted, self, self.interrupts, lambda _: None)
        finally:
            assert all(link.closed for link in self.transport.started)

    @property
    def reads(self) -> list[str]:
        """Return the number of rows of each read."""
        return [event for event in self.events if event.endswith(" rows")]

    def order(self, *events: str) -> bool:
        """Return True if each event happened once, in this order."""
        return [event for event in self.events if event in events] == [*events]


class Watched(FakeWorker):
    """Records the steps of its loading."""

    def __init__(self, spec: WorkerSpec, note: Callable[[str], None]) -> None:
        super().__init__(spec)
        self._note = note

    def hear(self, message: object) -> None:
        if isinstance(message, Load | Configure):
            self._note(type(message).__name__)
        super().hear(message)


def joined_anew(path: Path) -> None:
    """Remove the marker of the published result. The next run then reads every row."""
    (path.parent / "out/.batchinfer-res/published.json").unlink()


def test_it_is_opened_before_a_row_is_read_and_loads_with_the_first_batch(
    tmp_path: Path, model: Path
) -> None:
    seen = Seen()
    outcome = seen.run(write_job(tmp_path, model, people(BATCH + 10)))
    assert outcome.exit_code == 0
    assert seen.order(
        "reading", "open", f"{BATCH} rows", "Load", f"{BATCH + 10} rows", "planning", "Configure"
    )


@pytest.fixture
def stands_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineStandby]:
    """A standby process for the fake engine, as the command line starts it first."""
    monkeypatch.setattr(standby, "usable_cpus", lambda: 2)
    with EngineStandby(FAKE.engine) as found:
        yield found


def test_the_standby_process_becomes_the_engine(
    tmp_path: Path, model: Path, stands_by: EngineStandby
) -> None:
    """It ends with the run."""
    transport, child = FakeTransport(), stands_by._child
    assert child is not None
    options = replace(FAKE, transport=transport, standby=stands_by)
    outcome = run(write_job(tmp_path, model, people(30)), options)
    assert outcome.row["rows_ok"] == 30
    assert transport.started == []
    assert not child.alive
    assert stands_by.take() is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("why", ["nothing is missing", "two engines share the cores", "another engine"])
def test_an_unused_standby_process_is_ended(
    tmp_path: Path, model: Path, stands_by: EngineStandby, why: str
) -> None:
    path = write_job(tmp_path, model, people(20))
    if why == "nothing is missing":
        run(path)
    if why == "another engine":
        stands_by.factory = "module:of_another_engine"
    child, transport = stands_by._child, FakeTransport()
    assert child is not None
    options = replace(FAKE, transport=transport, standby=stands_by)
    assert run(path, options, *([TWO] if why == "two engines share the cores" else [])).exit_code == 0
    assert not child.alive
    assert bool(transport.started) == (why != "nothing is missing")


def test_on_one_core_there_is_no_standby_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "usable_cpus", lambda: 1)
    with EngineStandby(FAKE.engine) as found:
        assert found.take() is None


def test_no_engine_loads_if_no_answer_is_missing(tmp_path: Path, model: Path) -> None:
    path = write_job(tmp_path, model, people(20))
    Seen().run(path)
    published, changed = Seen(), Seen()
    assert published.run(path).row["exit_status"] == "already published"
    assert "open" not in published.events
    joined_anew(path)
    assert changed.run(path).exit_code == 0
    assert changed.order("open", "20 rows", "planning")
    assert not {"Load", "Configure"} & {*changed.events}


@pytest.mark.slow
def test_a_run_that_finds_its_rows_read_loads_before_it_plans(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_job(tmp_path, model, people(20))
    monkeypatch.setenv("FAKE_ENGINE_DIES_AT_STEP", "0")
    with pytest.raises(BatchInferError):
        Seen().run(path)
    monkeypatch.delenv("FAKE_ENGINE_DIES_AT_STEP")
    seen = Seen()
    seen.run(path)
    assert "20 rows" not in seen.events
    assert seen.order("open", "Load", "planning", "Configure")


@pytest.mark.slow
def test_of_two_engines_none_is_started_before_both_have_a_row(tmp_path: Path, model: Path) -> None:
    seen, one = Seen(), Seen()
    seen.run(write_job(tmp_path, model, people(20)), TWO)
    assert seen.order("20 rows", "open", "open", "Load", "Load", "planning", "Configure", "Configure")
    alike = [{"id": str(n), "text": "the same", "age": 1} for n in range(20)]
    assert one.run(write_job(tmp_path, model, alike), TWO, replace=True).row["replicas"] == 1
    assert one.order("20 rows", "planning", "open", "Load", "Configure")


@pytest.mark.slow
def test_no_engine_starts_early_alongside_a_run_of_the_same_job(tmp_path: Path, model: Path) -> None:
    path, seen = write_job(tmp_path, model, people(20)), Seen()
    Seen().run(path)
    joined_anew(path)
    write_job(tmp_path, model, people(21))
    store = tmp_path / "out/.batchinfer-res/completions"
    with announce_plans(store, [tmp_path / "no plan"], FileOps()):
        os.link(next(store.glob("part-*.parquet")), tmp_path / "no plan")
        seen.run(path)
    assert seen.order("21 rows", "planning", "open", "Load", "Configure")


def refused(path: Path, seen: Seen) -> BatchInferError:
    with pytest.raises(BatchInferError) as caught:
        seen.run(path)
    assert not list((path.parent / "out/res").glob("*")), "something was published"
    return caught.value


def test_an_unreadable_input_starts_no_engine(tmp_path: Path, model: Path) -> None:
    seen = Seen()
    assert isinstance(refused(write_job(tmp_path, model), seen), InputMissing)
    assert "open" not in seen.events


def test_the_beginning_of_every_file_is_read_before_anything_starts(tmp_path: Path, model: Path) -> None:
    """The second file has an unknown format: no engine starts for the rows of the first."""
    (tmp_path / "a.jsonl").write_text('{"text": "Ann"}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "Bob"}\n')[:-6])
    path, seen = write_job(tmp_path, model, input={"path": ["a.jsonl", "b.jsonl.gz"]}), Seen()
    with pytest.raises(InputCorrupt, match=r"b\.jsonl\.gz"):
        seen.run(path)
    assert "open" not in seen.events


def test_footers_are_read_once(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    usual = ParquetReader.schema

    def schema(reader: ParquetReader) -> pa.Schema:
        read.append(reader._file.name)
        return usual(reader)

    monkeypatch.setattr(ParquetReader, "schema", schema)
    (tmp_path / "in").mkdir()
    for name in "abc":
        pq.write_table(pa.table({"text": [name] * 3}), tmp_path / "in" / f"{name}.parquet")
    path = write_job(tmp_path, model, input={"path": "in"})
    assert run(path).row["rows_ok"] == 9
    assert len(read) == len({*read}) == 3


@pytest.mark.slow
def test_damage_that_is_found_while_it_loads_ends_the_run(tmp_path: Path, model: Path) -> None:
    """The damage is far after the rows that are read before the engine starts."""
    dice, seen = random.Random(0), Seen()
    rows = ({"id": str(n), "text": dice.randbytes(200).hex()} for n in range(6 * BATCH))
    lines = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    (tmp_path / "in.jsonl.gz").write_bytes(gzip.compress(lines)[:-100])
    error = refused(write_job(tmp_path, model, input={"path": "in.jsonl.gz"}), seen)
    assert isinstance(error, InputCorrupt)
    assert seen.order("open", seen.reads[0], "Load")
    assert "planning" not in seen.events


def test_an_engine_that_fails_to_load_ends_the_run_while_rows_are_read(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE_REFUSES", "OutOfMemory")
    seen = Seen()
    assert refused(write_job(tmp_path, model, people(2 * BATCH)), seen).exit_code == 71
    assert seen.order("open", "Load")
    assert not {"planning", "Configure"} & {*seen.events}


def test_a_signal_ends_reading_and_loading_and_the_next_run_finishes(tmp_path: Path, model: Path) -> None:
    path, again = write_job(tmp_path, model, people(BATCH + 1)), Seen()
    stages = ("Load", "Configure", "open", f"{BATCH + 1} rows", "planning")
    for stage in stages[: examples(1, 5)]:
        seen = Seen()
        seen.hears = lambda event, stage=stage: event == stage and os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted) as caught:
            seen.run(path)
        assert caught.value.exit_code == 128 + signal.SIGTERM
        assert (seen.events.count("open"), seen.events[-1]) == (1, stage)
    assert again.run(path).row["rows_ok"] == BATCH + 1
