"""An order to calibrate a model for int4. Plain values, so that it can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.request import TokenIds
from batchinfer.engine.config import LoadConfig


@dataclass(frozen=True, slots=True)
class CalibrationOrder:
    """An order for an int4 checkpoint in the empty `folder`, with groups of `group` inputs, of the
    model that `load` names. `prompts`: in the order in which they were drawn; `answer_tokens`: the most of an answer
    to each, 0 where the job's rows have no answers that are texts. `adapted`: whether adapters of the model are to
    fit the checkpoint, too."""

    load: LoadConfig
    prompts: tuple[TokenIds, ...]
    answer_tokens: int
    folder: Path
    group: int
    adapted: bool = False
