"""Compares jobs on a Ray cluster on this machine with two processes without Ray."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median

import duckdb
import psutil

from batchinfer.pipeline.workers.engine_entry import ENGINE
from tests.ray_cluster import cluster, engines
from tests.speed.jobs import own_bytes, phase_of, run, write_job
from tests.speed.processes import command_of
from tests.suite.run import ROOT
from tests.suite.section import BenchSection, Part, Result
from tests.suite.turns import Metrics, compared

QUICKSTART = ROOT / "jobs" / "quickstart" / "job.yaml"
SAMPLE_S = 0.5


def parts(section: BenchSection) -> list[Part]:
    """Return the quickstart, and a part for each number of rows that an engine answers at once."""
    fast = [
        (f"{rows} rows", partial(_compared, section, f"{rows} rows", partial(_fast, section.place, rows)))
        for rows in section.given.rows
    ]
    return [
        ("quickstart", partial(_compared, section, "quickstart", partial(_quickstart, section.place))),
        *fast,
    ]


def _compared(
    section: BenchSection, name: str, measured: Callable[[Sequence[str], int], Metrics]
) -> list[Result]:
    """Compare two engines on a cluster with two processes."""
    with cluster() as found:
        ways = {
            "two processes": ["--set", "engine.data_parallel=2"],
            "ray": ["--ray", found.address],
        }
        calls = {way: partial(measured, options) for way, options in ways.items()}
        return compared(name, calls, section.given.rounds, "engine_s")


def _quickstart(place: Path, options: Sequence[str], number: int) -> Metrics:
    """Return the engine time of the quickstart."""
    folder = place / "quickstart"
    shutil.rmtree(folder, ignore_errors=True)
    command = command_of(run, QUICKSTART, ["--set", f"output.path={folder / 'res'}", *options], None, ENGINE)
    subprocess.run(command, check=True, cwd=ROOT)
    return _reported(folder / "res-report", "engine_s, wall_s")


def _fast(place: Path, rows: int, options: Sequence[str], number: int) -> Metrics:
    """Return the driver's CPU time, and the growth of memory in the engine phase."""
    folder = place / str(rows)
    shutil.rmtree(folder, ignore_errors=True)
    command = command_of(run, write_job(folder, rows, "auto"), options, folder / "cpu_s")
    running = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(folder)})
    driver, sizes = psutil.Process(running.pid), Sizes()
    while running.poll() is None:
        if phase_of(folder) == "running":
            with suppress(psutil.NoSuchProcess):
                sizes.sample(driver)
        time.sleep(SAMPLE_S)
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, command)
    metrics = _reported(folder / "res-report", "engine_s, wall_s")
    cpu_s = float((folder / "cpu_s").read_text())
    return metrics | {"driver_cpu_s": cpu_s, "driver_cpu_per_row_s": cpu_s / rows} | sizes.growth


class Sizes:
    """The memory of the driver, of the actors and of Ray's control service, while the engines compute."""

    def __init__(self) -> None:
        self._seen: dict[str, list[int]] = {}

    def sample(self, driver: psutil.Process) -> None:
        """Record the memory of each process."""
        actors = sum(map(own_bytes, engines()))
        services = [one for one in psutil.process_iter(["name"]) if one.info["name"] == "gcs_server"]
        held = {"driver": own_bytes(driver), "actors": actors, "gcs": sum(map(own_bytes, services))}
        for name, size in held.items():
            if size:
                self._seen.setdefault(name, []).append(size)

    @property
    def growth(self) -> Mapping[str, int]:
        """Return the growth of each process in bytes, from the first to the last quarter of the samples.

        Medians ignore the short peaks of planning a wave.
        """
        return {
            f"{name}_grown_bytes": _last(sizes) - _last(sizes[::-1]) for name, sizes in self._seen.items()
        }


def _last(sizes: Sequence[int]) -> int:
    """Return the median of the last quarter."""
    return int(median(sizes[-max(1, len(sizes) // 4) :]))


def _reported(folder: Path, columns: str) -> Metrics:
    """Return columns of a run's report."""
    report = max(folder.glob("run-*.parquet"), key=os.path.getmtime)
    found: Metrics = duckdb.sql(f"SELECT {columns} FROM '{report}'").to_arrow_table().to_pylist()[0]
    return found
