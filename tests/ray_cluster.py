"""A Ray cluster on loopback: a head without CPUs, and nodes that tests add and remove."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
LOOPBACK = "127.0.0.1"
# Before ray is imported. The first one keeps Ray on the loopback; the others make it find a lost node in seconds
SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
}


class RayCluster:
    """A head, and nodes with one CPU each. Engines are processes that psutil finds."""

    def __init__(self) -> None:
        os.environ.update(SETTINGS)
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "node_ip_address": LOOPBACK, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head | _SMALL)
        self.address: str = self._cluster.address

    def add(self, cpus: int = 1, environment: Mapping[str, str] | None = None) -> Any:
        """Add a node.

        Args:
            environment: additional environment variables of its processes.
        """
        node = self._cluster.add_node(
            num_cpus=cpus, node_ip_address=LOOPBACK, env_vars=dict(environment or {}), **_SMALL
        )
        self._cluster.wait_for_nodes()
        return node

    def remove(self, node: Any, graceful: bool = False) -> None:
        """Remove a node."""
        self._cluster.remove_node(node, allow_graceful=graceful)

    def shutdown(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()

    def run(
        self,
        *arguments: str,
        module: str = "tests.fake_cli",
        folder: Path | None = None,
        joins: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> Any:
        """Start `batchinfer run` and return the process.

        Args:
            arguments: Further arguments of the command.
            module: The module with the command line.
            folder: The working directory.
            joins: Whether the job runs on this cluster.
            environment: Environment variables of the process in addition to this process's own.
        """
        ray = ["--ray", self.address] if joins else []
        command = [sys.executable, "-m", module, "run", *arguments, *ray]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command,
            stdout=pipe,
            stderr=pipe,
            text=True,
            cwd=folder,
            env={**os.environ, **(environment or {})},
        )


_SMALL = {"object_store_memory": 80 << 20}


def engines() -> list[psutil.Process]:
    """Return the processes of all actors that run an engine."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or [""]
        if command[0].startswith("ray::EngineActor"):
            found.append(process)
    return found


@contextmanager
def cluster(nodes: int = 2) -> Iterator[RayCluster]:
    """Yield a cluster with that many nodes of one CPU."""
    found = RayCluster()
    try:
        for _ in range(nodes):
            found.add()
        yield found
    finally:
        found.shutdown()
