"""The constraint of a job, compiled before anything else in a process that can be ended: a hostile one may hang."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from batchinfer.spawning import Child, receiving

if TYPE_CHECKING:
    from batchinfer.request import SamplingParams

_ENTRY = "batchinfer.data.prompts.constraint_check:serve"
WITHIN_S = (
    5.0  # with the start of a process, which takes 0.3 s; a schema that people write takes milliseconds
)
MEMORY_BYTES = 1 << 30


def constraint_problem(params: SamplingParams, within_s: float = WITHIN_S) -> str | None:
    """Why the constraint of `params` cannot be followed; None where it can, or where there is none."""
    if params.constraint is None:
        return None
    with Child(_ENTRY, params) as child:
        try:
            with receiving():
                if not child.connection.poll(within_s):
                    return (
                        f"{params.constraint}: compiling it takes longer than {within_s:g} s; make it simpler"
                    )
                problem: str | None = child.connection.recv()
                return problem
        except EOFError:
            ended = child.wait(1.0)
            return (
                f"{params.constraint}: compiling it ended the process that did so ({ended}); make it simpler"
            )


def serve(params: SamplingParams, pipe: Connection[Any, Any]) -> None:
    """The process's whole life."""
    from batchinfer.data.prompts.grammar import BadConstraint, check_grammar
    from batchinfer.data.prompts.render_worker import limit_memory

    limit_memory(MEMORY_BYTES)
    try:
        check_grammar(params)
    except BadConstraint as error:
        pipe.send(str(error))
    else:
        pipe.send(None)
