"""A run with nodes: `batchinfer worker --join` in process groups of their own, over the loopback."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import Interrupted, Unavailable
from batchinfer.job import load_job
from batchinfer.pipeline.run import run_job
from batchinfer.pipeline.workers import replica
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.pipeline.workers.nodes import lobby, node_transport
from batchinfer.report.progress import Progress
from tests.batchinfer.pipeline.test_orphans import MARK, marked
from tests.batchinfer.pipeline.test_pipeline import run, table
from tests.batchinfer.test_ranks_job import FLOAT32, REAL, SILENT_S, STAGES, TENSOR, job
from tests.batchinfer.test_replicas import report
from tests.batchinfer.wrong_jobs import environment
from tests.examples import first_of
from tests.node_processes import ENGINE, RANK, Meeting, Node
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
DATA = "engine.data_parallel"
ROOT = Path(__file__).parents[2]
KINDS = {DATA: ENGINE, STAGES: RANK}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path, warm_children: None) -> list[dict[str, Any]]:
    """What one process answers."""
    path = job(tmp_path_factory.mktemp("alone") / "job", model)
    run(path, REAL, FLOAT32)
    return table(path)


@pytest.fixture
def meeting(tmp_path: Path) -> Meeting:
    return Meeting(tmp_path)


def run_with(
    meeting: Meeting, path: Path, count: int, *settings: tuple[str, str],
    wait_s: float = PATIENCE_S, told: Callable[[str], None] = lambda _: None, interrupts: Interrupts | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run a job with so many nodes. told: gets each line for the user."""

    def notice(line: str) -> None:
        meeting.notices.append(line)
        told(line)

    loaded = load_job(path, (FLOAT32, meeting.settings(count, wait_s), *settings))
    progress = Progress(io.StringIO(), quiet=True)
    return run_job(loaded, REAL, progress, interrupts or Interrupts(), notice).row


@contextmanager
def striking(
    find: Callable[[], list[int]], after_s: float, signum: int, send: Callable[[int, int], None] = os.kill
) -> Iterator[None]:
    """Send a signal to the first process that is found, so long after it was."""
    over = threading.Event()

    def strike() -> None:
        while not over.is_set():
            with suppress(FileNotFoundError, ProcessLookupError):
                if found := find():
                    over.wait(after_s)
                    send(found[0], signum)
                    return
            time.sleep(0.02)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_engines_of_nodes_answer_as_one_process_does(
    tmp_path: Path, model: Path, alone: list[dict[str, Any]], meeting: Meeting, count: int
) -> None:
    path, engines = job(tmp_path / "job", model), 1 + count
    with meeting.nodes(count) as nodes:
        row = run_with(meeting, path, count)
        assert {node.ended() for node in nodes} == {0}
        assert [node.left for node in nodes] == [[]] * count
    assert table(path) == alone
    found = row["exit_code"], row["replicas"], row["machines"], row["worker_restarts"]
    assert found == (0, engines, engines, 0)
    assert sum("has joined" in line for line in meeting.notices) == count
    assert "joined the run" in nodes[0].text


@pytest.mark.slow
@pytest.mark.parametrize("division", [{STAGES: 2}, {STAGES: 2, TENSOR: 2}])
def test_stages_on_two_machines_answer_as_one_process_does(
    tmp_path: Path, model: Path, alone: list[dict[str, Any]], meeting: Meeting, division: dict[str, int]
) -> None:
    path = job(tmp_path / "job", model)
    with meeting.nodes(1) as nodes:
        row = run_with(meeting, path, 1, *((name, str(size)) for name, size in division.items()))
        assert nodes[0].ended() == 0
        assert nodes[0].left == []
    assert table(path) == alone
    ranks = division[STAGES] * division.get(TENSOR, 1)
    assert (row["exit_code"], row["replicas"], row["ranks"], row["machines"]) == (0, 1, ranks, 2)


@pytest.mark.slow
def test_a_node_with_another_token_gets_nowhere(tmp_path: Path, model: Path, meeting: Meeting) -> None:
    path, other = job(tmp_path / "job", model), tmp_path / "other"
    other.touch(0o600)
    other.write_text("f" * 48)
    with meeting.nodes(1, other) as nodes:
        loaded = load_job(path, (FLOAT32, meeting.settings(1, 4.0)))
        progress = Progress(io.StringIO(), quiet=True)
        with pytest.raises(Unavailable, match="0 of 1 nodes have joined"):
            run_job(loaded, REAL, progress, Interrupts(), meeting.notices.append)
        assert nodes[0].ended() == 77
    assert "another token" in nodes[0].text
    assert any("was refused" in line for line in meeting.notices)


def test_a_node_of_another_version_is_sent_away(
    tmp_path: Path, model: Path, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, here, interrupts = job(tmp_path / "job", model), lobby.about_this(), Interrupts()
    with pytest.raises(Unavailable, match="0 of 1 nodes have joined"):
        run_with(meeting, path, 1, wait_s=0.1)
    monkeypatch.setattr(lobby, "about_this", lambda: here | {"torch": "0.9"})

    def enough(line: str) -> None:
        if "was sent away" in line:
            interrupts.pending = signal.SIGINT

    with meeting.nodes(1) as nodes:
        with pytest.raises(Interrupted):
            run_with(meeting, path, 1, told=enough, interrupts=interrupts)
        assert nodes[0].ended() == 69
    said = f"torch {here['torch']}, and 0.9 where the job runs"
    assert said in nodes[0].text
    assert any(said in line for line in meeting.notices)


def test_a_node_with_other_files_computes_nothing(
    tmp_path: Path,
    model: Path,
    alone: list[dict[str, Any]],
    meeting: Meeting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank of another model would spoil the engine; an engine of another model would give other answers."""
    read = node_transport.digests

    def other(path: Path, cache: Any) -> dict[str, str]:
        return read(path, cache) | {"model.safetensors": "0" * 64}

    monkeypatch.setattr(node_transport, "digests", other)
    path = job(tmp_path / "job", model)
    said = r"is not what the run reads: model.safetensors differs"
    with meeting.nodes(1), pytest.raises(Unavailable, match=said):
        run_with(meeting, path, 1, (STAGES, "2"))
    with meeting.nodes(1):
        assert run_with(meeting, path, 1)["exit_code"] == 0
    assert table(path) == alone
    assert any("model.safetensors differs; the other engines go on" in line for line in meeting.notices)


@pytest.mark.parametrize(("seed", "how"), first_of(
    ((seed, how) for seed in range(10) for how in ("SIGSTOP", "SIGKILL", "SIGTERM")), 1
))  # fmt: skip
def test_the_others_go_on_without_a_lost_node(
    tmp_path: Path, model: Path, alone: list[dict[str, Any]], meeting: Meeting, monkeypatch: pytest.MonkeyPatch,
    seed: int, how: str,
) -> None:  # fmt: skip
    """At any moment since it has an engine."""
    monkeypatch.setattr(replica, "SILENT_S", SILENT_S)
    monkeypatch.setattr(replica, "LOADING_SILENT_S", 2 * SILENT_S)
    monkeypatch.setattr("batchinfer.pipeline.workers.nodes.node.START_S", 2.0)
    monkeypatch.setattr("batchinfer.pipeline.workers.nodes.remote_process._KILL_S", 1.0)
    path, after_s = job(tmp_path / "job", model), random.Random(seed).uniform(0, 4.0)
    with meeting.nodes(1) as nodes:
        (lost,) = nodes

        def found() -> list[int]:
            return [lost.process.pid] if lost.computing(ENGINE) else []

        with striking(found, after_s, getattr(signal, how)):
            row = run_with(meeting, path, 1)
        assert (row["exit_code"], row["replicas"], row["machines"]) == (0, 2, 2)
        assert sum("has joined" in line for line in meeting.notices) == 1
        if how == "SIGSTOP":
            with suppress(ProcessLookupError):
                os.kill(lost.process.pid, signal.SIGCONT)
        codes = {"SIGKILL": (-9, 0), "SIGSTOP": (69, 0), "SIGTERM": (143, 0)}  # 0: it was over by then
        assert lost.ended() in codes[how]
        wait_until(lambda: not lost.left)
    assert table(path) == alone


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", [STAGES, DATA])
def test_a_process_that_is_lost_on_a_node_is_started_again(
    tmp_path: Path, model: Path, alone: list[dict[str, Any]], meeting: Meeting, seed: int, kind: str
) -> None:
    path, after_s = job(tmp_path / "job", model), random.Random(f"{kind} {seed}").uniform(0, 4.0)
    with meeting.nodes(1) as nodes:
        with striking(lambda: nodes[0].computing(KINDS[kind]), after_s, signal.SIGKILL):
            row = run_with(meeting, path, 1, (kind, "2"))
        assert (row["exit_code"], nodes[0].ended(), nodes[0].left) == (0, 0, [])
    assert table(path) == alone
    assert (row["machines"], row["ranks"]) == (2, 2 if kind == STAGES else 1)
    assert "joined the run" in nodes[0].text


def lost_while_computing(node: Node, kind: bytes, after_s: float = 1.0) -> AbstractContextManager[None]:
    """Kill a node with all its processes, so long after it has one of that kind."""

    def found() -> list[int]:
        return [node.process.pid] if node.computing(kind) else []

    return striking(found, after_s, signal.SIGKILL, os.killpg)


MANY = {STAGES: 400, DATA: 2000}  # rows that outlast a loss on a quiet machine
ONE_BY_ONE = ("engine.max_num_seqs", "1")  # a row at a time, so that nothing is done before a node is lost


@pytest.mark.slow
@pytest.mark.parametrize("kind", [STAGES, DATA])
@pytest.mark.parametrize("seed", range(4))
def test_a_node_that_waits_takes_the_place_of_a_lost_one(
    tmp_path: Path, model: Path, meeting: Meeting, kind: str, seed: int
) -> None:
    """Where another engine computes, too, rows enough are left for the new one."""
    after_s = random.Random(f"{kind} {seed}").uniform(0, 2.5)
    paths = [job(tmp_path / name, model, MANY[kind]) for name in ("alone", "job")]
    run(paths[0], REAL, FLOAT32)
    with meeting.nodes(1) as nodes, ExitStack() as stack:

        def told(line: str) -> None:
            if "has joined" in line and len(nodes) == 1:
                nodes.extend(stack.enter_context(meeting.nodes(1)))
            if "waits for one to be lost" in line:
                stack.enter_context(lost_while_computing(nodes[0], KINDS[kind], after_s))

        row = run_with(meeting, paths[1], 1, (kind, "2"), ONE_BY_ONE, told=told)
        assert [node.ended() for node in nodes] == [-9, 0]
        wait_until(lambda: not nodes[0].left and not nodes[1].left)
    assert table(paths[1]) == table(paths[0])
    assert (row["exit_code"], row["worker_restarts"]) == (0, 1)
    engines = {one["engine"] for one in report(paths[1], "steps")}
    assert row["replicas"] in engines, "the new one computed nothing"
    assert "this one waits for one to be lost" in nodes[1].text
    assert "joined the run" in nodes[1].text


@pytest.mark.slow
def test_a_node_that_joins_later_has_to_have_the_token(
    tmp_path: Path, model: Path, alone: list[dict[str, Any]], meeting: Meeting
) -> None:
    """One without it is refused while the run waits; then comes one that has it."""
    path, other, nodes = job(tmp_path / "job", model), tmp_path / "other", list[Node]()
    other.touch(0o600)
    other.write_text("f" * 48)
    with ExitStack() as stack:

        def waits(line: str) -> None:
            if "waiting up to" in line and len(nodes) == 1:
                nodes.extend(stack.enter_context(meeting.nodes(1, other)))
            if "was refused" in line:
                nodes.extend(stack.enter_context(meeting.nodes(1)))

        nodes.extend(stack.enter_context(meeting.nodes(1)))
        with lost_while_computing(nodes[0], RANK):
            row = run_with(meeting, path, 1, (STAGES, "2"), told=waits)
        assert [node.ended() for node in nodes] == [-9, 77, 0]
    assert "another token" in nodes[1].text
    assert table(path) == alone
    assert (row["exit_code"], row["worker_restarts"]) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["signal", "limit"])
def test_a_run_without_an_engine_waits_for_so_long_or_until_it_is_interrupted(
    tmp_path: Path, model: Path, alone: list[dict[str, Any]], meeting: Meeting, ends: str
) -> None:
    """What was answered is stored, and the same command goes on."""
    path, interrupts, limit_s = job(tmp_path / "job", model), Interrupts(), 8.0

    def told(line: str) -> None:
        if ends == "signal" and "waiting up to" in line:
            interrupts.pending = signal.SIGINT

    error, said = (
        (Interrupted, "answers are stored") if ends == "signal" else (Unavailable, r"node 1 .* is gone, and")
    )
    with (
        meeting.nodes(1) as nodes,
        lost_while_computing(nodes[0], RANK),
        pytest.raises(error, match=said) as ended,
    ):
        run_with(meeting, path, 1, (STAGES, "2"), wait_s=limit_s, told=told, interrupts=interrupts)
    assert ended.value.exit_code == (130 if ends == "signal" else 69)
    assert [line for line in meeting.notices if f"waiting up to {limit_s:.0f} s" in line]
    with meeting.nodes(1):
        assert run_with(meeting, path, 1, (STAGES, "2"))["exit_code"] == 0
    assert table(path) == alone


@pytest.mark.parametrize("kind", first_of((STAGES, DATA), 1))
def test_nothing_is_left_of_a_command_that_is_killed(
    tmp_path: Path, model: Path, alone: list[dict[str, Any]], meeting: Meeting, kind: str
) -> None:
    path, mark = job(tmp_path / "job", model), "killed-" + meeting.folder.name
    settings = [FLOAT32, (kind, "2"), ONE_BY_ONE, meeting.settings(1)]
    command = [sys.executable, "-m", "batchinfer", "run", str(path), "-q"]
    command += [word for name, value in settings for word in ("--set", f"{name}={value}")]
    with meeting.nodes(1) as nodes:
        with subprocess.Popen(command, start_new_session=True, env=environment(**{MARK: mark})) as process:
            wait_until(lambda: _found(nodes[0], KINDS[kind]) or process.poll() is not None)
            time.sleep(1.0)
            assert process.poll() is None
            process.kill()
        assert nodes[0].ended() == 69
        assert "is gone" in nodes[0].text
        wait_until(lambda: not nodes[0].left and not marked(mark))
    run(path, REAL, FLOAT32)
    assert table(path) == alone


def _found(node: Node, kind: bytes) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return node.computing(kind)
    return []


@pytest.mark.slow
@pytest.mark.parametrize("block", [0, 1])
def test_the_commands_of_the_docs_run(
    tmp_path: Path, model: Path, alone: list[dict[str, Any]], meeting: Meeting, block: int
) -> None:
    """By ssh, and under Slurm: each machine's command, on this one."""
    page = (ROOT / "docs/large-models.md").read_text()
    section = page.partition("## Several machines")[2].partition("\n## ")[0]
    fenced = re.findall(r"```(yaml|sh)\n(.*?)```", section, re.DOTALL)
    (yaml,) = (text for kind, text in fenced if kind == "yaml")
    commands = [text for kind, text in fenced if kind == "sh"][block]
    path = job(tmp_path / "job", model)
    described = json.loads(path.read_text())  # JSON is YAML
    engine = "".join(f"  {name}: {value}\n" for name, value in described.pop("engine").items())
    sections = [f"{name}: {json.dumps(section)}\n" for name, section in described.items()]
    path.write_text("".join([*sections, _here(yaml, meeting), engine]))
    token, *by_ssh = next(text for kind, text in fenced if kind == "sh").splitlines()
    processes = []
    subprocess.run(["sh", "-c", token], cwd=path.parent, check=True)
    for number in (0, 1):
        script = by_ssh[number] if block == 0 else commands.replace("srun --nodes 2 --ntasks-per-node 1 ", "")
        env = environment(SLURM_PROCID=str(number))
        processes.append(subprocess.Popen(["sh", "-c", _here(script, meeting)], cwd=path.parent, env=env))
    assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]
    assert [row["custom_id"] for row in table(path)] == [row["custom_id"] for row in alone]
    assert {row["status"] for row in table(path)} == {"ok"}


def _here(text: str, meeting: Meeting) -> str:
    named = text.replace("10.0.0.1:7700", f"{meeting.host}:{meeting.port}")
    return re.sub(r"\bbatchinfer (?=run|worker)", f"{sys.executable} -m batchinfer ", named)
