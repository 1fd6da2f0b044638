"""No child process outlives its parent, whenever that is killed; and names of the ways in which a child ends."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from batchinfer.machine.spawning import Child, ChildExit, receiving
from tests.batchinfer.pipeline.test_pipeline import people, write_job
from tests.batchinfer.wrong_jobs import alive, environment
from tests.examples import first_of
from tests.patience import PATIENCE_S

MARK = "BATCHINFER_TEST_MARK"
TASKS = "tests.batchinfer.child_tasks"
# A child should end within 2 s, and an orphan would run for 600 s. The limit is between, for busy machines.
GONE_S = 120.0
PARENT = f"""
import os, signal, sys, threading
from batchinfer.machine.spawning import Child
threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGKILL)).start()
while True:
    Child("{TASKS}:sleep")
"""

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="only Linux kills a child with its parent"
    ),
    pytest.mark.usefixtures("cold_children"),
]


def marked(mark: str) -> list[int]:
    """Return the processes with this mark in their environment."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes():
                found.append(int(path.parent.name))
        except (OSError, ValueError):
            continue
    return alive(found)


def killed_after(delay_s: float, command: list[str], cwd: Path, **env: str) -> list[int]:
    """Kill a command after a delay, and return the processes that outlived it. A failing test leaves them running."""
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, *command], cwd=cwd, start_new_session=True, env=environment(**{MARK: mark}, **env),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        with suppress(subprocess.TimeoutExpired):
            process.wait(delay_s)
        process.kill()
    deadline = time.monotonic() + GONE_S
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


@pytest.mark.sample(1)
@pytest.mark.parametrize("turn", range(6))
def test_children_end_with_a_parent_that_is_killed_while_it_starts_them(turn: int, tmp_path: Path) -> None:
    """The parent kills itself while it starts children: some have not begun, some already run."""
    delay = random.Random(turn).uniform(0.02, 0.4)
    left = killed_after(PATIENCE_S, ["-c", PARENT, str(delay)], tmp_path)
    assert left == [], f"killed after {delay} s"


@pytest.mark.parametrize("turn", first_of([3, 1, 0, 2, *range(4, 60)], 1))
def test_nothing_is_left_of_a_run_that_is_killed(turn: int, tmp_path: Path, model: Path) -> None:
    """At a random time during start, rendering, the engine's start, or its work."""
    write_job(tmp_path, model, people(3000))
    delay = random.Random(turn).uniform(0.3, 6.0)
    command = ["-m", "tests.fake_cli", "run", "job.yaml"]
    left = killed_after(delay, command, tmp_path, FAKE_ENGINE_DELAY_S="0.5")
    assert left == [], f"killed after {delay} s"


def test_a_child_whose_parent_is_gone_imports_nothing() -> None:
    with Child(f"{TASKS}:greet") as child:
        child.connection.recv()  # it runs: before, the kernel may not have set its command line up yet
        command = Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")[:-1]
    orphan = [os.fsdecode(word) for word in command]
    orphan[orphan.index(str(os.getpid()))] = "999999999"
    done = subprocess.run(
        [*orphan[:1], "-v", *orphan[1:]], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert "import 'site'" in done.stderr
    assert "import 'ctypes'" not in done.stderr
    assert "import 'batchinfer" not in done.stderr


def test_a_child_is_killed_with_the_thread_that_made_it() -> None:
    """The kernel counts the starting thread as the parent. Children start in threads that live long enough."""
    made: list[Child] = []

    def make() -> None:
        made.append(Child(f"{TASKS}:greet"))
        made[0].connection.recv()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    ended = made[0].wait(GONE_S)
    made[0].close()
    assert ended.code == -signal.SIGKILL


def test_a_child_gets_its_arguments_and_no_signal_of_a_terminal() -> None:
    with Child(f"{TASKS}:echo", {"a": [1, None]}, "ü" * 100_000) as child:
        values, blocked = child.connection.recv()
        ended = child.wait(GONE_S)
    assert values == [{"a": [1, None]}, "ü" * 100_000]
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= set(blocked)
    assert ended.code == 0


def test_a_child_imports_before_it_gets_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors of imports are raised where the module is needed."""
    (tmp_path / "made_for_this.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    with Child.standing_by(f"{TASKS}:echo", ("no_such_module", "made_for_this")) as child:
        patience = time.monotonic() + PATIENCE_S
        while not (tmp_path / "imported").exists() and time.monotonic() < patience:
            time.sleep(0.01)
        assert (tmp_path / "imported").exists()
        child.begin("late")
        assert child.connection.recv()[0] == ["late"]


def test_a_child_has_no_descriptor_but_its_own(tmp_path: Path) -> None:
    """Most importantly, no descriptor of the lock of the state folder."""
    with open(tmp_path / "lock", "w"), Child(f"{TASKS}:greet") as child:
        child.connection.recv()  # it runs
        links = {os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir()}
    assert str(tmp_path / "lock") not in links


def test_a_child_that_ends_in_the_middle_of_a_message_is_gone_like_any_other() -> None:
    with Child(f"{TASKS}:die_in_a_message") as child:
        for _ in range(2):
            with pytest.raises(EOFError), receiving():
                child.connection.recv()
        ended = child.wait(GONE_S)
    assert ended.code == -signal.SIGKILL


@pytest.mark.parametrize(("how", "words", "memory"), [
    ("3", "ended with exit status 3", False),
    (f"signal {int(signal.SIGSEGV)}", "ended by signal 11 (SIGSEGV)", False),
    (f"signal {int(signal.SIGKILL)}", "memory ran out", True),
    pytest.param("cpu", "limit on a process's CPU time (RLIMIT_CPU", False, marks=pytest.mark.slow),
])  # fmt: skip
def test_how_a_child_ended(how: str, words: str, memory: bool) -> None:
    with Child(f"{TASKS}:end", how) as child:
        ended = child.wait(PATIENCE_S)
    assert words in str(ended)
    assert ended.out_of_memory == memory


def test_sigkill_at_the_cpu_time_limit_is_not_reported_as_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ulimit -t 5` sets both limits, and the kernel then sends SIGKILL at once."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5, 5))
    at_limit, early = ChildExit(-signal.SIGKILL, 5.01), ChildExit(-signal.SIGKILL, 2.0)
    assert (at_limit.out_of_cpu_time, at_limit.out_of_memory) == (True, False)
    assert "limit of 5 s" in str(at_limit)
    assert (early.out_of_cpu_time, early.out_of_memory) == (False, True)
