"""Sets up a rehearsal's process before its first section: Triton's interpreter, and a fake GPU."""

from __future__ import annotations

from tests.kernels.gpu import interpreter


def prepare() -> None:
    """Enable Triton's interpreter before triton is imported. The engine is then built as for a GPU."""
    interpreter.switch_on()
    from tests.batchinfer.engine import interpreted_gpu

    interpreted_gpu.stand_in(setattr, compiles=False, quick=True)
