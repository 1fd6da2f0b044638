"""Whole jobs on a Ray cluster: the same bytes as on one machine, whatever becomes of actors, nodes and the driver."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
MANY = [{"id": f"r{i}", "text": f"word {i} " * (1 + i % 7)} for i in range(400)]
SLOW_STEPS = {"FAKE_ENGINE_DELAY_S": "0.05", "FAKE_ENGINE_BATCH": "4"}


@pytest.fixture(scope="module")
def on() -> Iterator[RayCluster]:
    """A head and two nodes of one CPU."""
    os.environ.update(SLOW_STEPS)
    try:
        with cluster() as found:
            yield found
    finally:
        for name in SLOW_STEPS:
            os.environ.pop(name)


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Place:
    found = make_place(tmp_path / "job", model)
    found.rows(*MANY)
    found.job("commit: {rows: 8, seconds: 1}", "engine: {max_num_seqs: 4}")
    return found


def ended(process: Any, code: int = 0) -> tuple[str, str]:
    """Wait for a command. Return its stdout and stderr."""
    out, err = process.communicate(timeout=PATIENCE_S)
    print(err)
    assert process.returncode == code, err
    return out, err


def committed(place: Place) -> int:
    """Count the parts that a run has stored."""
    return len([*place.state.glob("completions/*.json")])


def same_as_alone(place: Place, tmp_path: Path, command: Callable[..., Any]) -> None:
    """Assert that the published bytes are those of one engine on this machine."""
    other = make_place(tmp_path / "alone", place.shared_model)
    other.rows(*MANY)
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


def test_killed_actors(on: RayCluster, place: Place, tmp_path: Path, cli_of: Any) -> None:
    """No row is lost, answered twice or blamed."""
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


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_driver(signum: int, on: RayCluster, place: Place, tmp_path: Path, cli_of: Any) -> None:
    """Ray ends the actors, and the same command resumes."""
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
def test_lost_nodes(on: RayCluster, place: Place, tmp_path: Path, cli_of: Any) -> None:
    """A run outlives nodes that are removed while others are added."""
    process = on.run("job.yaml", folder=place.folder)
    node = on.add()
    for graceful in (False, True):
        before = committed(place)
        wait_until(lambda before=before: committed(place) > before)
        on.remove(node, graceful)
        node = on.add()
    ended(process)
    same_as_alone(place, tmp_path, cli_of())
    on.remove(node)


def test_no_cluster(place: Place, cli_of: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = cli_of()("validate", place.folder / "job.yaml", "--ray", f"127.0.0.1:{port}")
    assert found.code == 69
    assert f"ray.address 127.0.0.1:{port}" in found.err
