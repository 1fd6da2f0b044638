"""Constraints, compiled before the engine meets them in a process that can be ended: hostile ones hang or crash it.

Schemas and grammars are compiled by recursion without a limit on depth, and a regular expression may take minutes.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from batchinfer.core.errors import Unavailable
from batchinfer.core.sampling import INT32_MAX, SamplingParams
from batchinfer.machine.memory import lift_memory_limit, limit_memory
from batchinfer.machine.spawning import Child, Ended, receiving
from batchinfer.machine.waiting import comes

_ENTRY = "batchinfer.input.constraints.constraint_check:serve"
WITHIN_S = 5.0  # of CPU time; a schema that people write takes milliseconds
# Beside other work a process may get little CPU time, and it or its virtual machine may stand still. That says nothing
# about a constraint, so these are for a process that does nothing any more.
_WAIT_S = 50
_START_S = 60  # measured: 0.3 s, and 0.4 s for a vocabulary of 49,152 tokens
MEMORY_BYTES = 1 << 30
_LEAVE_S = 5.0  # a process that closed its pipe has ended by then
CONTINUES = "run the same command again"


class ConstraintChecker:
    """Says of one constraint after the other why it cannot be followed.

    `definition`: of the tokenizer, with which compiling may take far longer than without; None: there is none yet.
    The process starts with the first constraint, and again after one that ended it. It leaves with its parent.
    """

    def __init__(self, definition: str | None, within_s: float = WITHIN_S) -> None:
        self._definition, self._within_s = definition, within_s
        self._child: Child | None = None

    def __enter__(self) -> ConstraintChecker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def problem(self, params: SamplingParams) -> str | None:
        """Why the constraint of `params` cannot be followed; None where it can, or where there is none."""
        if params.constraint is None:
            return None
        ended = self._asked(params)
        if (
            isinstance(ended, Ended) and ended.code != -signal.SIGPROF
        ):  # that one is the constraint's own CPU time
            ended = self._asked(
                params, again=True
            )  # anything may end a process, and others were compiled before
        if isinstance(ended, Ended):
            return f"{params.constraint}: {self._why(ended)}"
        return ended

    def _asked(self, params: SamplingParams, again: bool = False) -> str | Ended | None:
        """Return the process's answer, or how it ended. None if it fell silent, because the system then tells
        nothing."""
        child = self._child = self._child or self._started()
        with suppress(BrokenPipeError, ConnectionResetError):  # it died: the answer does not come
            child.connection.send(params)
        try:
            with receiving():
                if comes(child.connection, _WAIT_S):
                    problem: str | None = child.connection.recv()
                    return problem
            if again:
                raise Unavailable(
                    f"the process that checks constraints has not answered for {_WAIT_S} s; {CONTINUES}"
                )
            ended = None
        except EOFError:
            ended = child.wait(_LEAVE_S)
        self.close()
        return ended or Ended(None)

    def close(self) -> None:
        """End the process; safe to call twice."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _started(self) -> Child:
        """A process that is ready; the second one, should the first end before it is."""
        for _ in range(2):
            child = Child(_ENTRY, self._definition, self._within_s)
            how = self._not_ready(child)
            if how is None:
                return child
            child.close()
        raise Unavailable(f"the process that checks constraints {how}; {CONTINUES}")

    def _not_ready(self, child: Child) -> str | None:
        """Return how a process ended that did not start to work; None if it works."""
        try:
            with receiving():
                if comes(child.connection, _START_S):
                    child.connection.recv()
                    return None
            return f"is not ready after {_START_S} s"
        except EOFError:
            return str(child.wait(_LEAVE_S) or "closed its connection")

    def _why(self, ended: Ended) -> str:
        if ended.code == -signal.SIGPROF:
            return f"compiling it takes longer than {self._within_s:g} s; make it simpler"
        if ended.code in (-signal.SIGSEGV, -signal.SIGBUS):
            return "its rules or references lead too deep into one another; make it flatter"
        if ended.code == -signal.SIGABRT:
            return f"compiling it takes more than {MEMORY_BYTES >> 30} GiB of memory; make it simpler"
        return f"the process that compiled it ended, twice ({ended}); make it simpler"


def constraint_problem(
    params: SamplingParams, definition: str | None = None, within_s: float = WITHIN_S
) -> str | None:
    """Why the constraint of `params` cannot be followed; None where it can, or where there is none."""
    with ConstraintChecker(definition, within_s) as checker:
        return checker.problem(params)


def serve(definition: str | None, within_s: float, pipe: Connection[Any, Any]) -> None:
    """The process's whole life: parameters in, what is wrong with their constraint out."""
    lift_memory_limit()  # a large vocabulary may take more than a worker that renders has left
    check = _check_of(definition)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    limit_memory(MEMORY_BYTES)
    pipe.send(None)
    while True:
        try:
            with receiving():
                params = pipe.recv()
        except EOFError:
            return
        try:
            with _cpu_time(within_s), _mute():
                problem = check(params)
        except MemoryError:  # constraints before this one may have taken it: it is asked of a new process
            os.kill(os.getpid(), signal.SIGABRT)
            return
        pipe.send(problem)


def _check_of(definition: str | None) -> Callable[[SamplingParams], str | None]:
    """Return the function that finds the problem of a constraint in this process."""
    from batchinfer.input.constraints.grammar import BadConstraint, check_grammar
    from batchinfer.input.constraints.grammar_tokenizer import GrammarTokenizer, grammar_problem

    if definition is not None and (unread := grammar_problem(definition)) is not None:
        return lambda params: f"{params.constraint}: {unread}"
    tokenizer = None if definition is None else GrammarTokenizer.of(definition, (), INT32_MAX).library

    def problem(params: SamplingParams) -> str | None:
        try:
            check_grammar(params, tokenizer)
        except BadConstraint as error:
            return str(error)
        return None

    return problem


@contextmanager
def _cpu_time(within_s: float) -> Iterator[None]:
    """The system ends this process, also in the middle of a library, when it has used so much CPU time."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, within_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def _mute() -> Iterator[None]:
    """Keep what a library writes as it ends this process off the user's terminal."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
