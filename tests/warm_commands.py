"""Commands that tests start, as forks of a process that has imported everything: where a new interpreter is not the
point."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.warm_children import WarmChildren

# What is read when an interpreter starts, or when a library is imported
READ_EARLY = ("PYTHON", "LANG", "LC_", "LD_", "OMP_", "MKL_", "TORCH", "TRITON", "ARROW", "MALLOC", "COLUMNS")


Ran = subprocess.CompletedProcess[Any]


class WarmCommand(subprocess.Popen[Any]):
    """A `subprocess.Popen` of `python -m module …`, which sends signals, waits and ends as any other.

    It is a new interpreter all the same where what it asks for is read before its first line, and in `make test-all`.
    Its command line, as /proc has it, is that of the process that was forked.
    """

    warm: WarmChildren | None = None  # while tests have one

    def _execute_child(
        self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int,
        c2pwrite: int, errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any,
        umask: Any, start_new_session: bool, process_group: int,
    ) -> None:  # fmt: skip
        if self.warm is None or [*args[:2]] != [sys.executable, "-m"] or pass_fds or _is_read_early(env):
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, process_group,
            )  # fmt: skip
            return
        streams = [own if own >= 0 else number for number, own in enumerate((p2cread, c2pwrite, errwrite))]
        env = dict(os.environ) if env is None else env
        folder = os.path.realpath(cwd or os.getcwd())
        self.pid = self.warm.command(
            [str(word) for word in args[2:]], env, folder, streams, start_new_session
        )
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def _is_read_early(env: dict[str, str] | None) -> bool:
    """Whether a variable differs from ours that a process which runs already would not see."""
    if env is None:
        return False
    differs = {name for name in {*env, *os.environ} if env.get(name) != os.environ.get(name)}
    return any(name.startswith(READ_EARLY) for name in differs - {"PYTHONPATH"})


def run(
    command: Sequence[str],
    *,
    timeout: float | None = None,
    capture_output: bool = False,
    check: bool = False,
    **how: Any,
) -> Ran:
    """Do as `subprocess.run` does."""
    if capture_output:
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with WarmCommand(command, **how) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            process.kill()
    ran = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        ran.check_returncode()
    return ran
