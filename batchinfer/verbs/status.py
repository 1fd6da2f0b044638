"""Implements `batchinfer status`: reports the state of a job's run from its files. Nothing is changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from batchinfer.core.errors import InputMissing, Interrupted, StopTimeReached, StorageError
from batchinfer.core.wording import count, percent, rough_duration, seconds, short_number, shown, size
from batchinfer.filesystem.durable import FileOps, replace_bytes
from batchinfer.filesystem.json_files import read_json
from batchinfer.filesystem.state import StateFolder, state_of
from batchinfer.job import Job
from batchinfer.pipeline.progress_file import PROGRESS_FORMAT, STARTING
from batchinfer.report.tables.exit_status import PUBLISHED, is_published
from batchinfer.store.results.find_state import find_state
from batchinfer.store.results.manifest import read_manifest

Standing = Literal["running", "finished", "stopped", "interrupted", "failed", "crashed"]


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The status of the last run of a job. A field is None if it is unknown or does not apply to the current phase.

    Attributes:
        state: "running", or in one word how the run ended.
        output: The result folder.
        job: The name of the job.
        run_id: The id of the run.
        pid: The process id of the driver.
        started_at: The start, as an ISO timestamp.
        updated_at: The time of the last progress, as an ISO timestamp.
        phase: The current phase, or the last one if the run has ended.
        rows: The number of rows done in the phase.
        rows_total: The number of all rows of the phase.
        tokens: The number of tokens done, including tokens saved by shared prefixes.
        tokens_total: The expected number of tokens of the run.
        share: The share of the phase that is done, 0 to 1.
        per_s: The rate in tokens per second, or in rows per second if `tokens` is None.
        left_s: The expected seconds to the end of the phase.
        errors: The number of error rows by code.
        memory_bytes: The resident memory of the run's processes.
        exit_code: The exit code, if the run has ended.
        exit_status: How the run ended, as in the report, such as "published" or "out of memory".
    """

    state: Standing
    output: str
    job: str | None = None
    run_id: str | None = None
    pid: int | None = None
    started_at: str | None = None
    updated_at: str | None = None
    phase: str | None = None
    rows: int | None = None
    rows_total: int | None = None
    tokens: int | None = None
    tokens_total: int | None = None
    share: float | None = None
    per_s: float | None = None
    left_s: float | None = None
    errors: dict[str, int] = field(default_factory=dict)
    memory_bytes: int | None = None
    exit_code: int | None = None
    exit_status: str | None = None

    @property
    def running(self) -> bool:
        """Return True if the run has not ended."""
        return self.state == "running"

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return asdict(self)

    def lines(self, now: datetime) -> list[str]:
        """Return the status as lines for users. The first line is a heading.

        Args:
            now: The current time.
        """
        told = [("phase", self._phase()), ("rows", _of(count(self.rows), self.rows_total, count)),
                ("tokens", _of(short_number(self.tokens), self.tokens_total, short_number)), ("speed", self._speed()),
                ("errors", self._errors()), ("memory", size(self.memory_bytes) if self.memory_bytes else ""),
                ("started", _moment(self.started_at)), ("written", self._age(now)),
                ("results", self.output)]  # fmt: skip
        known = {"rows": self.rows is not None, "tokens": self.tokens is not None}
        return [
            self._head(),
            *(f"  {name:<9}{text}" for name, text in told if text and known.get(name, True)),
        ]

    def _head(self) -> str:
        head = f"{self.job or self.output}: {self.state}"
        if self.state == "crashed":
            return f"{head}; the same command continues where it stopped"
        if self.exit_status is None or self.running:
            return head
        told = [] if self.exit_status == self.state else [self.exit_status]
        told += [f"exit code {self.exit_code}"] if self.exit_code else []
        return f"{head} ({', '.join(told)})" if told else head

    def _phase(self) -> str:
        share = "" if self.share is None else f", {percent(self.share)} of it done"
        return f"{self.phase}{share}" if self.phase else ""

    def _speed(self) -> str:
        if self.per_s is None or not self.running:
            return ""
        left = "" if self.left_s is None else f", about {rough_duration(self.left_s)} left"
        return f"{short_number(self.per_s)} {'rows' if self.tokens is None else 'tok'}/s{left}"

    def _errors(self) -> str:
        ranked = sorted(self.errors.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{code} {count(number)}" for code, number in ranked)

    def _age(self, now: datetime) -> str:
        if self.updated_at is None:
            return ""
        return f"{seconds(max(0.0, (now - datetime.fromisoformat(self.updated_at)).total_seconds()))} ago"


def _of(done: str, total: int | None, shown: Any) -> str:
    return done if total is None else f"{done} of {shown(total)}"


def status_of(target: Path | Job) -> RunStatus:
    """Return the status of the running or last run of a job.

    Args:
        target: The job, or its result folder.

    Raises:
        InputMissing: No run has begun.
        StorageError: The file with the progress is damaged.
    """
    state = state_of(target) if isinstance(target, Job) else find_state(target)
    parts = state.recorded_parts()
    running = [part for part in parts if state.is_running(part)]
    if parts:
        part = (running or parts)[0]
        return _read(part / state.progress.name, bool(running))
    return _unrecorded(state)


def _read(path: Path, running: bool) -> RunStatus:
    found = _recorded(path)
    if running and found.exit_status is not None:
        # The record of the previous run: the current run holds the lock and has written nothing yet
        return RunStatus("running", found.output, found.job, phase=STARTING)
    return replace(found, state=_standing(running, found.exit_status))


def _recorded(path: Path) -> RunStatus:
    facts = read_json(path)
    wrong = StorageError(f"{path}: this version cannot read this progress file; the next run replaces it")
    if not isinstance(facts, dict) or facts.pop("format", None) != PROGRESS_FORMAT:
        raise wrong
    try:
        found = TypeAdapter(RunStatus).validate_json(json.dumps({**facts, "state": "running"}), strict=True)
        for moment in filter(None, (found.started_at, found.updated_at)):
            datetime.fromisoformat(moment)
    except ValueError:  # includes pydantic's ValidationError
        raise wrong from None
    return found


def _standing(running: bool, ended: str | None) -> Standing:
    if running:
        return "running"
    if ended is None:  # the process ended and lost its lock without recording why
        return "crashed"
    if ended == StopTimeReached.status:
        return "stopped"
    if ended == Interrupted.status:
        return "interrupted"
    return "finished" if is_published(ended) else "failed"


def _unrecorded(state: StateFolder) -> RunStatus:
    # Before the first run records its progress, or after the file was removed
    if state.path.is_dir() and state.is_running(state.path):
        return RunStatus("running", str(state.results), phase=STARTING)
    manifest = read_manifest(state.destination)
    if manifest is None:
        raise InputMissing(f"{state.results}: no run of this job has begun yet; `batchinfer run` starts one")
    return RunStatus("finished", str(state.results), manifest.job, rows=manifest.rows, rows_total=manifest.rows,
                     exit_status=PUBLISHED)  # fmt: skip


def prometheus_lines(found: RunStatus) -> Iterator[str]:
    """Yield the lines of a status as metrics in Prometheus's exposition format 0.0.4."""
    labels = {"job": found.job or "", "output": found.output}
    for name, help_text, value in _metrics(found):
        if value is not None:
            yield from _metric(name, help_text, [(labels, value)])
    codes = [({**labels, "code": code}, number) for code, number in sorted(found.errors.items())]
    if codes:
        yield from _metric("error_rows", "Error rows of the run by code.", codes)


def _metrics(found: RunStatus) -> list[tuple[str, str, float | None]]:
    return [
        ("running", "Whether a run of the job is running.", float(found.running)),
        (
            "crashed",
            "Whether the last run crashed: it ended without recording how.",
            float(found.state == "crashed"),
        ),
        ("exit_code", "Exit code of the last run; absent while one is running.", found.exit_code),
        ("start_time_seconds", "When the run started, in Unix time.", _unix(found.started_at)),
        (
            "update_time_seconds",
            "When the run last wrote its progress, in Unix time.",
            _unix(found.updated_at),
        ),
        ("rows", "Rows that are done in the current phase.", found.rows),
        ("rows_expected", "Rows of the current phase.", found.rows_total),
        ("tokens", "Tokens that are done, including tokens saved by shared prefixes.", found.tokens),
        ("tokens_expected", "Tokens that the run is expected to do in all.", found.tokens_total),
        ("progress_ratio", "Share of the current phase that is done.", found.share),
        ("left_seconds", "Estimated time to the end of the current phase.", found.left_s),
        ("memory_bytes", "Resident memory of the run's processes.", found.memory_bytes),
    ]


def _metric(name: str, help_text: str, samples: Sequence[tuple[dict[str, str], float]]) -> Iterator[str]:
    yield f"# HELP batchinfer_{name} {help_text}"
    yield f"# TYPE batchinfer_{name} gauge"
    for labels, value in samples:
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"batchinfer_{name}{{{shown}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _moment(text: str | None) -> str:
    return "" if text is None else shown(datetime.fromisoformat(text).astimezone(UTC))


def _unix(text: str | None) -> float | None:
    return None if text is None else datetime.fromisoformat(text).astimezone(UTC).timestamp()


def write_prometheus(found: RunStatus, path: Path) -> None:
    """Write a status as Prometheus metrics to a file, atomically, since node_exporter may read it at any time.

    Raises:
        StorageError: The file cannot be written.
    """
    text = "".join(f"{line}\n" for line in prometheus_lines(found))
    replace_bytes(path, text.encode(), FileOps())
