"""Calibrates a model in a child process, which frees all its memory when it ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from typing import Any

from batchinfer.core.errors import BatchInferError, OutOfMemory, Unavailable
from batchinfer.engine.config import CalibrationOrder
from batchinfer.models.calibration.work import CalibrationOutcome
from batchinfer.pipeline.workers.endings import failure
from batchinfer.pipeline.workers.messages import Failed
from batchinfer.pipeline.workers.transport import Link, Transport
from batchinfer.pipeline.workers.worker_handle import error_of

CALIBRATOR = "batchinfer.pipeline.calibration.process:serve"
_LEAVE_S = 10.0
_LOOK_S = 0.25
_REMEDY = "free some memory, or set model.calibration: off"
_AGAIN = "the same command starts the calibration again"


def serve(order: CalibrationOrder, connection: Connection[Any, Any]) -> None:
    """Calibrate a model, as the entry point of a child process.

    Sends pairs (layers done, all layers) and finally a CalibrationOutcome, or Failed after an error.

    Args:
        order: The model, the prompts and the folder of the checkpoint to write.
        connection: The connection to the parent process.
    """
    try:
        from batchinfer.engine.load.int4 import calibrate_int4  # imports torch

        connection.send(calibrate_int4(order, lambda done, count: connection.send((done, count))))
    except (BrokenPipeError, EOFError):
        return  # the parent is gone
    except BaseException as error:  # noqa: BLE001 - the parent reports every error
        connection.send(failure(error, "the calibration", _REMEDY))
        raise SystemExit(1) from None


def calibrate_in_child(
    order: CalibrationOrder,
    on_layer: Callable[[int, int], None],
    waiting: Callable[[], None],
    transport: Transport,
) -> CalibrationOutcome:
    """Calibrate a model in another process, and write the calibrated checkpoint.

    Args:
        order: The model, the prompts and the folder of the checkpoint to write.
        on_layer: Called with the numbers of calibrated layers and of all layers.
        waiting: Called about every 0.25 s.
        transport: Starts the process on the machine that runs engines.

    Returns:
        The loss of the calibrated weights, and the number of experts with few tokens.

    Raises:
        BatchInferError: The model cannot be loaded or calibrated.
        OutOfMemory: The process was killed because memory ran out.
        Unavailable: The process ended in another way.
    """
    with closing(transport.call(CALIBRATOR, order, order.load)) as child:
        try:
            while True:
                if not child.poll(_LOOK_S):
                    waiting()
                    continue
                message: Any = child.receive()
                if isinstance(message, Failed):
                    raise error_of(message, str(order.load.model))
                if isinstance(message, CalibrationOutcome):
                    return message
                if isinstance(message, tuple):  # the first message on a cluster is not a tuple but Placed
                    on_layer(*message)
        except EOFError:
            raise _crash(child) from None


def _crash(child: Link) -> BatchInferError:
    ended = child.wait(_LEAVE_S)
    what = f"the process that calibrates the model {'closed its connection' if ended is None else ended}"
    if ended is not None and ended.out_of_memory:
        return OutOfMemory(f"{what}; {_REMEDY}; {_AGAIN}")
    return Unavailable(f"{what}; {_AGAIN}")
