"""The answer to a prompt without content, by which the labels of a job are calibrated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from batchinfer.core.errors import BatchInferError
from batchinfer.core.scoring import Scoring
from batchinfer.filesystem.durable import storage
from batchinfer.store.outputs.labels import label_logprobs
from batchinfer.store.outputs.scores import STORED


def calibrated_scoring(scoring: Scoring, answer: tuple[Path, int] | None) -> Scoring:
    """Return the scoring with the prior that the answer to the prompt without content gives.

    answer: the part of the store in which it stands, and its row there. Raises BatchInferError where there is none, or
    it is an error, and StorageError.
    """
    if answer is None:
        raise BatchInferError(
            "the prompt without content (classify.calibrate) has no answer yet; run the job again"
        )
    part, row = answer
    with storage(part, "read"), pq.ParquetFile(part) as file:
        wanted = {"error_code", "error_message", *STORED.names}
        table = file.read(
            sorted(wanted & {*file.schema_arrow.names})
        )  # where all are errors there are no scores
    found: dict[str, Any] = table.slice(row, 1).to_pylist()[0]
    logprobs, _, lengths = (found.get(name) for name in STORED.names)
    if found["error_code"] is not None or logprobs is None:
        raise BatchInferError(
            f"the prompt without content (classify.calibrate) is an error, {found['error_code']}: "
            f"{found['error_message']}"
        )
    values = np.array(logprobs, np.float32), np.array(lengths, np.int32)
    return replace(scoring, prior=tuple(label_logprobs(*values, scoring.length_normalized).tolist()))
