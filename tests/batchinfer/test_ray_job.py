"""Runs whole jobs on a Ray cluster: bytes equal one machine's, also if actors, nodes or the driver die."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from tests.batchinfer.int4_jobs import make_divisible
from tests.batchinfer.wrong_jobs import Place, make_place
from tests.examples import seed
from tests.patience import PATIENCE_S, wait_until
from tests.ray_cluster import RayCluster, cluster, engines

if os.environ.get("CI"):
    import ray  # noqa: F401 - in CI, a missing ray is a failure
else:
    pytest.importorskip("ray")

pytestmark = pytest.mark.ray
QUICKSTART = Path(__file__).parents[2] / "jobs/quickstart/job.yaml"
MANY = [{"id": f"r{i}", "text": f"word {i} " * (1 + i % 7)} for i in range(240)]
KILLS = 13  # of a run; 52 in all four
LONGER = [{"id": f"r{i}", "text": f"word {i} " * (1 + i % 7)} for i in range(2400)]
STEP_S = 0.06

Pace = Callable[[float], None]


@pytest.fixture(scope="module")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pace]:
    """A function that sets the seconds per step in all engines, also in running ones."""
    file = tmp_path_factory.mktemp("pace") / "step_s"
    settings = {"FAKE_ENGINE_DELAY_FILE": str(file), "FAKE_ENGINE_BATCH": "4"}

    def change(step_s: float) -> None:
        new = file.with_suffix(".new")
        new.write_text(str(step_s))
        new.replace(file)

    change(STEP_S)
    os.environ.update(settings)
    yield change
    for name in settings:
        os.environ.pop(name)


@pytest.fixture(scope="module")
def on(pace: Pace) -> Iterator[RayCluster]:
    """A cluster with a head and two nodes of one CPU."""
    with cluster() as found:
        yield found


@pytest.fixture
def slow_steps(pace: Pace) -> Iterator[Pace]:
    """Make steps take half a second until the test changes the pace."""
    pace(0.5)
    yield pace
    pace(STEP_S)


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Place:
    found = make_place(tmp_path / "job", model)
    found.rows(*MANY)
    found.job("commit: {rows: 8, seconds: 1}", "engine: {max_num_seqs: 4}")
    return found


def ended(process: Any, code: int = 0) -> tuple[str, str]:
    """Wait for a command and return its stdout and stderr."""
    out, err = process.communicate(timeout=PATIENCE_S)
    print(err)
    assert process.returncode == code, err
    return out, err


def committed(place: Place) -> int:
    """Return the number of parts that a run has stored."""
    return len([*place.state.glob("completions/*.json")])


def same_as_alone(
    place: Place, tmp_path: Path, command: Callable[..., Any], rows: Sequence[dict[str, str]] = MANY
) -> None:
    """Assert that the published bytes equal a run with one engine on this machine."""
    other = make_place(tmp_path / "alone", place.shared_model)
    other.rows(*rows)
    other.job("engine: {max_num_seqs: 4}")
    assert command("run", other.folder / "job.yaml", "--quiet").code == 0
    files = [[*found.results.glob("*.parquet")] for found in (place, other)]
    ours, alone = ([file.read_bytes() for file in sorted(of)] for of in files)
    assert ours == alone != []


def test_the_quickstart_has_the_same_bytes(on: RayCluster, tmp_path: Path) -> None:
    given = ["--limit", "200", "--set", "engine.deterministic=true"]
    results = {}
    for name, joins in (("alone", False), ("two", True)):
        output = f"output.path={tmp_path / name}"
        out, _ = ended(on.run(str(QUICKSTART), *given, "--set", output, module="batchinfer", joins=joins))
        assert "(raylet)" not in out
        results[name] = [
            file.read_bytes() for file in sorted((tmp_path / f"{name}-first-200").glob("*.parquet"))
        ]
    assert results["two"] == results["alone"] != []


def test_killed_actors_lose_and_blame_no_row(
    on: RayCluster, place: Place, tmp_path: Path, cli_of: Any
) -> None:
    drawn = random.Random(seed())
    process = on.run("job.yaml", folder=place.folder)
    for _ in range(3):
        before = committed(place)
        wait_until(lambda before=before: committed(place) > before and engines())
        drawn.choice(engines()).kill()
    out, err = ended(process)
    assert "(raylet)" not in out
    assert "starting a new one" in err
    assert [row["status"] for row in place.table()] == ["ok"] * len(MANY)
    same_as_alone(place, tmp_path, cli_of())
    assert not engines()


STOPPED = [
    signal.SIGKILL,
    *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGTERM)),
]


@pytest.mark.parametrize("signum", STOPPED)
def test_after_a_killed_driver_the_same_command_resumes(
    signum: int, on: RayCluster, place: Place, tmp_path: Path, cli_of: Any
) -> None:
    """Ray ends the actors."""
    process = on.run("job.yaml", folder=place.folder)
    wait_until(lambda: committed(place))
    process.send_signal(signum)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
    wait_until(lambda: not engines())
    stored = committed(place)
    out, _ = ended(on.run("job.yaml", folder=place.folder))
    assert stored
    assert "reused from earlier runs" in out
    same_as_alone(place, tmp_path, cli_of())


@pytest.mark.slow
@pytest.mark.parametrize("run", range(4))
def test_many_killed_actors(
    run: int, on: RayCluster, pace: Pace, place: Place, tmp_path: Path, cli_of: Any
) -> None:
    """Kills happen at random moments. An engine without an answer between several deaths would be given up."""
    drawn, killed = random.Random(f"{seed()} {run}"), 0
    place.rows(*LONGER)
    process = on.run("job.yaml", folder=place.folder)
    while process.poll() is None and killed < KILLS:
        before = committed(place)
        wait_until(lambda before=before: committed(place) > before or process.poll() is not None)
        time.sleep(drawn.uniform(0, 2))
        if found := engines():
            drawn.choice(found).kill()
            killed += 1
    pace(0)
    try:
        ended(process)
    finally:
        pace(STEP_S)
    assert killed == KILLS, "the run ended before all kills"
    assert [row["status"] for row in place.table()] == ["ok"] * len(LONGER)
    same_as_alone(place, tmp_path, cli_of(), LONGER)


@pytest.mark.slow
def test_only_the_row_that_kills_its_engine_becomes_an_error(on: RayCluster, place: Place) -> None:
    node = on.add(2, {"FAKE_ENGINE_DIES_OF_MORE_TOKENS": "130", "FAKE_ENGINE_BATCH": "64"})
    place.rows(*MANY[:40], {"id": "long", "text": "word " * 25})
    place.job("on_error: {max_error_rate: 0.1}")
    try:
        ended(on.run("job.yaml", "--set", "ray.cpus=2", folder=place.folder))
    finally:
        on.remove(node)
    assert [row["row_id"] for row in place.table() if row["status"] == "error"] == [40]


@pytest.mark.slow
@pytest.mark.parametrize("graceful", [False, True])
def test_lost_nodes(
    graceful: bool, on: RayCluster, slow_steps: Pace, place: Place, tmp_path: Path, cli_of: Any
) -> None:
    """A run survives removed nodes while others are added. No row and no engine is blamed."""
    place.rows(*LONGER)
    node = on.add()
    process = on.run("job.yaml", folder=place.folder)
    removed = 0
    try:
        while removed < 5:
            before = committed(place)
            wait_until(lambda before=before: committed(place) > before or process.poll() is not None)
            assert process.poll() is None, f"the run ended after {removed} removals"
            on.remove(node, graceful)
            removed += 1
            node = on.add()
        slow_steps(0)
        _, err = ended(process)
    finally:
        on.remove(node)
    assert "died" not in err.replace("has died", "")
    assert [row["status"] for row in place.table()] == ["ok"] * len(LONGER)
    same_as_alone(place, tmp_path, cli_of(), LONGER)


@pytest.mark.slow
def test_a_frozen_node(on: RayCluster, place: Place, tmp_path: Path, cli_of: Any) -> None:
    """Ray treats the node as lost. Later messages of its engine are rejected."""
    node = on.add()
    process = on.run("job.yaml", folder=place.folder)
    wait_until(lambda: committed(place))
    frozen = [psutil.Process(one.process.pid) for of in node.all_processes.values() for one in of]
    frozen += [child for one in frozen for child in one.children(recursive=True)]
    for one in frozen:
        one.suspend()
    try:
        ended(process)
    finally:
        for one in frozen:
            if one.is_running():
                one.resume()
        on.remove(node)
    same_as_alone(place, tmp_path, cli_of())


@pytest.mark.slow
def test_stages_in_an_actor(on: RayCluster, tmp_path: Path) -> None:
    """An engine sharded into stages, and two engines without Ray, give one process's bytes."""
    node = on.add(2)
    cases = {"alone": (False, []), "stages": (True, ["engine.pipeline_parallel_size=2", "ray.cpus=2"]),
             "two": (False, ["engine.data_parallel=2"])}  # fmt: skip
    results = {}
    for name, (joins, more) in cases.items():
        given = [f"output.path={tmp_path / name}", "engine.deterministic=true", *more]
        settings = [part for one in given for part in ("--set", one)]
        ended(on.run(str(QUICKSTART), "--limit", "200", *settings, module="batchinfer", joins=joins))
        results[name] = [
            file.read_bytes() for file in sorted((tmp_path / f"{name}-first-200").glob("*.parquet"))
        ]
    on.remove(node)
    assert results["stages"] == results["two"] == results["alone"] != []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model": "model: {path: model, dtype: float32, quantization: int4}"}, "calibrated in"),
        ({"drafts": "drafts: {model: model, runs: first}"}, "requests first"),
        ({"drafts": "drafts: {model: model, runs: beside}"}, ""),
    ],
)
def test_calibration_and_draft_models_run_on_nodes(
    settings: dict[str, str], said: str, on: RayCluster, tmp_path: Path
) -> None:
    """Calibration and a draft model give one machine's results."""
    model = make_divisible(tmp_path / "model")
    results = {}
    for name, joins in (("alone", False), ("node", True)):
        place = make_place(tmp_path / name, model)
        place.rows(*MANY[:40])
        place.job("engine: {deterministic: true}", **settings)
        _, err = ended(on.run("job.yaml", module="batchinfer", folder=place.folder, joins=joins))
        assert said in err
        results[name] = [row["generated_text"] for row in place.table()]
    assert results["node"] == results["alone"]


@pytest.mark.slow
def test_a_node_of_another_class(on: RayCluster, slow_steps: Pace, place: Place, tmp_path: Path) -> None:
    """The node stays unused, unless the job allows any class. Then the result names each answer's class."""
    (tmp_path / "sitecustomize.py").write_text(OTHER_CPU)
    node = on.add(1, {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"})
    try:
        slow_steps(STEP_S)
        _, err = ended(on.run("job.yaml", folder=place.folder))
        assert "1 node of other classes unused" in err
        assert machine_classes(place) == {here()}
        slow_steps(0.5)  # each engine gets rows before another one has answered all
        other = ["--set", "ray.classes=any", "--set", "sampling.max_tokens=9"]
        _, err = ended(on.run("job.yaml", *other, "--replace", folder=place.folder))
        assert "3 engines" in err
        classes = {row["engine_class"] for row in place.table()}
        assert classes == machine_classes(place)
        assert len(classes) == 2
    finally:
        on.remove(node)


@pytest.mark.slow
def test_a_weaker_driver_changes_no_setting(on: RayCluster, place: Place, tmp_path: Path) -> None:
    """The setting follows from the nodes."""
    place.job(model="model: {path: model, dtype: auto}")
    settings = []
    for name, path in (("as it is", ""), ("weaker", str(tmp_path))):
        (tmp_path / "sitecustomize.py").write_text(WEAKER if path else "")
        paths = os.pathsep.join(filter(None, [path, os.environ["PYTHONPATH"]]))
        output = f"output.path={tmp_path / name}"
        ended(on.run("job.yaml", "--set", output, folder=place.folder, environment={"PYTHONPATH": paths}))
        report = sorted((tmp_path / f"{name}-report").glob("run-*.parquet"))[-1]
        row = pq.read_table(report).to_pylist()[0]
        settings.append(
            {
                key: row[key]
                for key in ("device", "dtype", "threads", "cores", "hardware", "replicas", "kv_cache_dtype")
            }
        )
    assert settings[0] == settings[1]


WEAKER = """
import batchinfer.machine.cpus as cpus, batchinfer.machine.hardware as hardware
cpus.usable_cpus = lambda *_: 1
hardware.has_fast_bf16 = lambda *_: False
"""
OTHER_CPU = """
import batchinfer.machine.hardware as hardware
real = hardware.detect
hardware.detect = lambda *given, **named: __import__("dataclasses").replace(real(*given, **named), name="another CPU")
"""


def machine_classes(place: Place) -> set[str]:
    files = sorted((place.folder / "out").glob("res-report/activities-*.parquet"))
    return {row["machine_class"] for row in pq.read_table(files[-1]).to_pylist()} - {None}


def here() -> str:
    from batchinfer.pipeline.workers.ray.machine_facts import node_facts

    return node_facts("cpu").machine_class


@pytest.mark.slow
def test_no_cluster(place: Place, cli_of: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = cli_of()("validate", place.folder / "job.yaml", "--ray", f"127.0.0.1:{port}")
    assert found.code == 69
    assert f"ray.address 127.0.0.1:{port}" in found.err
