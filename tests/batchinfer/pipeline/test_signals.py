"""On a signal, verbs other than `run` end at once with its exit code, without a traceback or surviving processes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchinfer.filesystem.durable import json_text
from batchinfer.store.results.manifest import (
    MANIFEST_NAME,
    Manifest,
    PublishSpec,
    ResultFile,
    file_name,
    generation_of,
)
from tests import warm_commands
from tests.batchinfer.pipeline.test_pipeline import people, write_job
from tests.batchinfer.wrong_jobs import alive, children, environment, hears_signals
from tests.patience import PATIENCE_S, wait_until

ENDLESS_SQL = (
    "SELECT count(*)::VARCHAR AS text FROM range(9999999) a, range(9999999) b WHERE a.range * b.range = -1"
)
ENDLESS_TEMPLATE = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ text }}"
WORKED_S = 0.3  # CPU seconds, after which the query or the rendering has started


def preview_sql(folder: Path, model: Path) -> list[str]:
    write_job(folder, model, input={"path": None, "sql": ENDLESS_SQL}, prompt={"user": "{{ text }}"})
    return ["preview", "job.yaml"]


def preview_template(folder: Path, model: Path) -> list[str]:
    write_job(folder, model, people(2), prompt={"user": ENDLESS_TEMPLATE})
    return ["preview", "job.yaml"]


def query(folder: Path, model: Path) -> list[str]:
    results = folder / "out" / "res"
    results.mkdir(parents=True)
    pq.write_table(pa.table({"status": ["ok"]}), results / "part.parquet")
    data = (results / "part.parquet").read_bytes()
    file = ResultFile("", 1, len(data), hashlib.sha256(data).hexdigest())
    generation = generation_of(PublishSpec("greetings", "i", (), 1), [file])
    file = replace(file, name=file_name(generation, 0))
    (results / "part.parquet").rename(results / file.name)
    manifest = Manifest("greetings", "i", (), 1, generation, 1, 1, 0, 0, (), (file,))
    (results / MANIFEST_NAME).write_bytes(json_text(manifest.to_json()))
    return ["query", "out/res", ENDLESS_SQL]


def processor_time(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants."""
    return sum(psutil.Process(one).cpu_times()[0] for one in (pid, *children(pid)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("make", "signum"), [
    (preview_sql, signal.SIGTERM),
    (preview_template, signal.SIGINT),
    (query, signal.SIGINT),
])  # fmt: skip
def test_a_signal_ends_a_verb_that_works(
    tmp_path: Path, model: Path, make: Callable[[Path, Path], list[str]], signum: signal.Signals
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    arguments = make(tmp_path, model)
    with warm_commands.start(
        [sys.executable, "-m", "batchinfer", *arguments], cwd=tmp_path, text=True, start_new_session=True,
        env=environment(TMPDIR=str(temporary)), preexec_fn=hears_signals,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        wait_until(lambda: [*temporary.glob("batchinfer-preview-*/*"), *temporary.glob("batchinfer-query-*")])
        before = processor_time(process.pid)
        wait_until(lambda: processor_time(process.pid) > before + WORKED_S)
        below = list(children(process.pid))
        os.killpg(process.pid, signum)
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (128 + signum, "", "batchinfer: interrupted\n")
    wait_until(lambda: not alive(below))
    assert not list(temporary.iterdir()), "its temporary files are still there"
