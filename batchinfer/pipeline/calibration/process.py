"""A model is calibrated in a process of its own, which frees all its memory when it ends."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from batchinfer.core.errors import BatchInferError, OutOfMemory, Unavailable
from batchinfer.engine.config import CalibrationOrder
from batchinfer.machine.spawning import Child, receiving
from batchinfer.models.calibration.work import CalibrationOutcome
from batchinfer.pipeline.workers.endings import failure
from batchinfer.pipeline.workers.messages import Failed
from batchinfer.pipeline.workers.worker_handle import error_of

CALIBRATOR = "batchinfer.pipeline.calibration.process:serve"
_LEAVE_S = 10.0
_LOOK_S = 0.25
_REMEDY = "free some memory, or set model.calibration: off"
_AGAIN = "the same command begins the calibration anew"


def serve(order: CalibrationOrder, connection: Connection[Any, Any]) -> None:
    """Entry point of the process: sends how many layers are done of how many, and at the end a CalibrationOutcome, or
    Failed."""
    try:
        from batchinfer.engine.load.int4 import calibrated  # torch

        connection.send(calibrated(order, lambda done, count: connection.send((done, count))))
    except (BrokenPipeError, EOFError):
        return  # nobody is left to tell
    except BaseException as error:  # noqa: BLE001 - whatever it was, the parent must hear of it
        connection.send(failure(error, "the calibration", _REMEDY))
        raise SystemExit(1) from None


def calibrate_in_child(
    order: CalibrationOrder, told: Callable[[int, int], None], waiting: Callable[[], None]
) -> CalibrationOutcome:
    """Write the checkpoint that is ordered, and return what that has come to. `told` gets how many layers are done, and
    how many there are; `waiting` is called now and then.

    Raises what loading a model raises, OutOfMemory and Unavailable.
    """
    with Child(CALIBRATOR, order) as child:
        try:
            with receiving():
                while True:
                    if not child.connection.poll(_LOOK_S):
                        waiting()
                        continue
                    message = child.connection.recv()
                    if isinstance(message, Failed):
                        raise error_of(message, str(order.load.model))
                    if isinstance(message, CalibrationOutcome):
                        return message
                    told(*message)
        except EOFError:
            raise _crash(child) from None


def _crash(child: Child) -> BatchInferError:
    ended = child.wait(_LEAVE_S)
    what = f"the process that calibrates the model {'closed its connection' if ended is None else ended}"
    if ended is not None and ended.out_of_memory:
        return OutOfMemory(f"{what}; {_REMEDY}; {_AGAIN}")
    return Unavailable(f"{what}; {_AGAIN}")
