"""Compiles constraints in a child process with limits on time and memory, before an engine gets them.

Schemas and grammars are compiled by unlimited recursion, and a regular expression may take minutes. A hostile
constraint would therefore hang or crash the engine.
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
from batchinfer.machine.spawning import Child, ChildExit, receiving
from batchinfer.machine.waiting import wait_for_message

_ENTRY = "batchinfer.input.constraints.constraint_check:serve"
WITHIN_S = 5.0  # limit on CPU time in seconds; an ordinary schema takes milliseconds
# Limits on elapsed time in seconds, only for a process that hangs: on a busy or paused machine, elapsed time says
# nothing about a constraint
_WAIT_S = 50
_START_S = 60  # the start takes 0.3 s, and 0.4 s with a vocabulary of 49,152 tokens
MEMORY_BYTES = 1 << 30
_LEAVE_S = 5.0  # time for a process to exit after it closed its pipe
CONTINUES = "run the same command again"


class ConstraintChecker:
    """Checks in a child process if constraints of answers are valid and supported.

    The process starts with the first constraint and is replaced when it dies. It exits with its parent.

    Args:
        definition: The tokenizer as the text of a tokenizer.json. None to check constraints without a tokenizer, which
            may be much faster.
        within_s: The maximum CPU time per constraint in seconds.
    """

    def __init__(self, definition: str | None, within_s: float = WITHIN_S) -> None:
        self._definition, self._within_s = definition, within_s
        self._child: Child | None = None

    def __enter__(self) -> ConstraintChecker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def problem(self, params: SamplingParams) -> str | None:
        """Return why the constraint of `params` is invalid or unsupported.

        None if it is valid, or there is no constraint.
        """
        if params.constraint is None:
            return None
        result = self._ask(params)
        # SIGPROF means that the constraint itself took too long. Other deaths may have other causes, such as memory
        # that earlier constraints took, so the constraint is tried again in a new process
        if isinstance(result, ChildExit) and result.code != -signal.SIGPROF:
            result = self._ask(params, again=True)
        if isinstance(result, ChildExit):
            return f"{params.constraint}: {self._why(result)}"
        return result

    def _ask(self, params: SamplingParams, again: bool = False) -> str | ChildExit | None:
        child = self._child = self._child or self._start()
        with suppress(BrokenPipeError, ConnectionResetError):  # the process died, which `recv` reports
            child.connection.send(params)
        try:
            with receiving():
                if wait_for_message(child.connection, _WAIT_S):
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
        return ended or ChildExit(None)

    def close(self) -> None:
        """End the child process. Safe to call twice."""
        if self._child is not None:
            self._child.close()
            self._child = None

    def _start(self) -> Child:
        for _ in range(2):
            child = Child(_ENTRY, self._definition, self._within_s)
            how = self._not_ready(child)
            if how is None:
                return child
            child.close()
        raise Unavailable(f"the process that checks constraints {how}; {CONTINUES}")

    def _not_ready(self, child: Child) -> str | None:
        try:
            with receiving():
                if wait_for_message(child.connection, _START_S):
                    child.connection.recv()
                    return None
            return f"is not ready after {_START_S} s"
        except EOFError:
            return str(child.wait(_LEAVE_S) or "closed its connection")

    def _why(self, ended: ChildExit) -> str:
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
    """Return why the constraint of `params` is invalid or unsupported. None if it is valid, or there is no constraint.

    Args:
        params: The parameters with the constraint.
        definition: The tokenizer as the text of a tokenizer.json, or None to check without one.
        within_s: The maximum CPU time in seconds.
    """
    with ConstraintChecker(definition, within_s) as checker:
        return checker.problem(params)


def serve(definition: str | None, within_s: float, pipe: Connection[Any, Any]) -> None:
    """Run the child process that checks constraints, until the parent closes the pipe.

    For each SamplingParams that it receives, it sends why its constraint is invalid or unsupported, or None.

    Args:
        definition: The tokenizer as the text of a tokenizer.json, or None to check without one.
        within_s: The maximum CPU time per constraint in seconds.
        pipe: The connection to the parent.
    """
    lift_memory_limit()  # a large vocabulary may need more than the limit inherited from a render worker
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
            with _cpu_time(within_s), _silence_stderr():
                problem = check(params)
        except MemoryError:  # earlier constraints may have used the memory, so the parent tries a new process
            os.kill(os.getpid(), signal.SIGABRT)
            return
        pipe.send(problem)


def _check_of(definition: str | None) -> Callable[[SamplingParams], str | None]:
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
    # The kernel can end the process even inside a library call
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, within_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@contextmanager
def _silence_stderr() -> Iterator[None]:
    # A library that crashes must not print on the user's terminal
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
