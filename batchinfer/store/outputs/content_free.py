"""Reads the answer to the prompt without content, which calibrates the labels of a job."""

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
    """Return the scoring of a classification with a prior: the log-probability of each label without content.

    It is read from the answer to the content-free prompt, in which a placeholder replaces the row's texts.

    Args:
        scoring: The scoring without prior.
        answer: The part of the store with the answer to the content-free prompt, and the number of its row in
            the part. None: there is no answer.

    Raises:
        BatchInferError: There is no answer, or it is an error.
        StorageError: The part cannot be read.
    """
    if answer is None:
        raise BatchInferError(
            "the prompt without content (classify.calibrate) has no answer yet; run the job again"
        )
    part, row = answer
    with storage(part, "read"), pq.ParquetFile(part) as file:
        wanted = {"error_code", "error_message", *STORED.names}
        # A part with errors only has no columns of scores
        table = file.read(sorted(wanted & {*file.schema_arrow.names}))
    found: dict[str, Any] = table.slice(row, 1).to_pylist()[0]
    logprobs, _, lengths = (found.get(name) for name in STORED.names)
    if found["error_code"] is not None or logprobs is None:
        raise BatchInferError(
            f"the prompt without content (classify.calibrate) is an error, {found['error_code']}: "
            f"{found['error_message']}"
        )
    values = np.array(logprobs, np.float32), np.array(lengths, np.int32)
    return replace(scoring, prior=tuple(label_logprobs(*values, scoring.length_normalized).tolist()))
