"""The answer to a prompt without content, by which the labels of a job are calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from batchinfer.core.errors import BatchInferError
from batchinfer.core.scoring import Scoring
from batchinfer.data.outputs.labels import label_logprobs
from batchinfer.data.outputs.scores import STORED
from batchinfer.data.storage.durable import storage


@dataclass(frozen=True, slots=True)
class CalibratingAnswer:
    """An answer of a store: the number of its part, its row there, and the scoring that knows it."""

    part: int
    row: int
    scoring: Scoring


def calibrated_scoring(
    scoring: Scoring, index_parts: Sequence[Path], completions: Sequence[Path]
) -> CalibratingAnswer:
    """Find the answer to the prompt without content, and return the scoring with the prior that it gives.

    index_parts: of the index with that prompt alone; completions: the parts of the store, oldest first. Raises
    BatchInferError where there is none, or it is an error, and StorageError.
    """
    (key,) = pq.read_table(list(index_parts), columns=["key"]).column("key").to_pylist()
    for number, part in enumerate(completions):
        with storage(part, "read"):
            keys = pq.read_table(part, columns=["key"]).column("key").to_pylist()
        if key in keys:
            row = keys.index(key)
            return CalibratingAnswer(number, row, replace(scoring, prior=_prior(part, row, scoring)))
    raise BatchInferError(
        "the prompt without content (classify.calibrate) has no answer yet; run the job again"
    )


def _prior(part: Path, row: int, scoring: Scoring) -> tuple[float, ...]:
    with storage(part, "read"):
        found: dict[str, Any] = pq.read_table(part).slice(row, 1).to_pylist()[0]
    logprobs, _, lengths = (found.get(name) for name in STORED.names)
    if found["error_code"] is not None or logprobs is None:
        raise BatchInferError(
            f"the prompt without content (classify.calibrate) is an error, {found['error_code']}: "
            f"{found['error_message']}"
        )
    values = np.array(logprobs, np.float32), np.array(lengths, np.int32)
    return tuple(label_logprobs(*values, scoring.length_normalized).tolist())
