"""Calibrates a model, or measures its quality, in a child process, which frees all its memory when it ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from batchinfer.core.errors import BatchInferError, OutOfMemory, Unavailable
from batchinfer.core.statistics.quality import Quality
from batchinfer.engine.config import CalibrationOrder, QualityOrder
from batchinfer.models.calibration.work import CalibrationOutcome
from batchinfer.pipeline.workers.endings import failure
from batchinfer.pipeline.workers.messages import Failed
from batchinfer.pipeline.workers.transport import Link, Transport
from batchinfer.pipeline.workers.worker_handle import error_of

_SERVE = "batchinfer.pipeline.calibration.process:serve"
_LEAVE_S = 10.0
_LOOK_S = 0.25

# Called with the number of finished layers and of all layers
OnLayer = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class _Task:
    """The words of messages about the work of a child process."""

    name: str
    verb: str
    remedy: str

    def crash_error(self, child: Link) -> BatchInferError:
        """Return the error of a child process that ended without a result."""
        ended = child.wait(_LEAVE_S)
        how = "closed its connection" if ended is None else ended
        what, again = (
            f"the process that {self.verb} {how}",
            f"the same command starts {self.name} again",
        )
        if ended is not None and ended.out_of_memory:
            return OutOfMemory(f"{what}; {self.remedy}; {again}")
        return Unavailable(f"{what}; {again}")


_CALIBRATION = _Task(
    "the calibration", "calibrates the model", "free some memory, or set model.calibration: off"
)
_QUALITY = _Task(
    "the quality measurement",
    "measures the quality of the quantised model",
    "free some memory, or set engine.quality_rows: 0",
)


def serve(order: CalibrationOrder | QualityOrder, connection: Connection[Any, Any]) -> None:
    """Calibrate, or measure the quality, as the entry point of the child process.

    Sends pairs (layers done, all layers) and finally a CalibrationOutcome or a Quality, or Failed after an error.
    """
    try:
        connection.send(_compute(order, lambda done, count: connection.send((done, count))))
    except (BrokenPipeError, EOFError):
        return  # the parent is gone
    except BaseException as error:  # noqa: BLE001 - the parent reports every error
        task = _CALIBRATION if isinstance(order, CalibrationOrder) else _QUALITY
        connection.send(failure(error, task.name, task.remedy))
        raise SystemExit(1) from None


def _compute(order: CalibrationOrder | QualityOrder, on_layer: OnLayer) -> CalibrationOutcome | Quality:
    """Do the work of an order. The imports are late because they load torch."""
    if isinstance(order, CalibrationOrder):
        from batchinfer.engine.load.int4 import calibrate_int4

        return calibrate_int4(order, on_layer)
    from batchinfer.engine.load.quality import measure_quality

    return measure_quality(order, on_layer)


def calibrate_in_child(
    order: CalibrationOrder, on_layer: OnLayer, waiting: Callable[[], None], transport: Transport
) -> CalibrationOutcome:
    """Write a calibrated checkpoint in another process.

    Args:
        order: The model, the prompts and the folder of the checkpoint.
        on_layer: Called with the number of calibrated layers and of all layers.
        waiting: Called about every 0.25 s.
        transport: Starts the process on the machine that runs engines.

    Raises:
        BatchInferError: The model cannot be loaded or calibrated.
        OutOfMemory: The process was killed because memory ran out.
        Unavailable: The process ended in another way.
    """
    found = _receive_result(order, _CALIBRATION, on_layer, waiting, transport)
    assert isinstance(found, CalibrationOutcome)
    return found


def measure_in_child(
    order: QualityOrder, on_layer: OnLayer, waiting: Callable[[], None], transport: Transport
) -> Quality:
    """Measure the quality of a quantised model in another process; arguments and errors as `calibrate_in_child`."""
    found = _receive_result(order, _QUALITY, on_layer, waiting, transport)
    assert isinstance(found, Quality)
    return found


def _receive_result(
    order: CalibrationOrder | QualityOrder,
    task: _Task,
    on_layer: OnLayer,
    waiting: Callable[[], None],
    transport: Transport,
) -> CalibrationOutcome | Quality:
    with closing(transport.call(_SERVE, order, order.load)) as child:
        try:
            while True:
                if not child.poll(_LOOK_S):
                    waiting()
                    continue
                message: Any = child.receive()
                if isinstance(message, Failed):
                    raise error_of(message, str(order.load.model))
                if isinstance(message, CalibrationOutcome | Quality):
                    return message
                if isinstance(message, tuple):  # the first message on a cluster is not a tuple but Placed
                    on_layer(*message)
        except EOFError:
            raise task.crash_error(child) from None
