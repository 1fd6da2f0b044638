"""Finds stored answers that an earlier version of a job's arithmetic made, and whose requests run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from batchinfer.core.wording import counted, rough_duration
from batchinfer.filesystem.state import StateFolder
from batchinfer.input.prompts.keys import TOKEN_BYTES, WorkKeys, token_bytes
from batchinfer.machine.hardware import coded_text
from batchinfer.plan.forecast.engine import EngineForecast
from batchinfer.plan.order.plan import Plan, PlanBatch
from batchinfer.plan.order.requests import Prompts, read_together
from batchinfer.plan.setup.job_setup import Setup, work_context
from batchinfer.store.answers.stored_keys import StoredKeys, key_starts

_LONG_S = 3600.0  # a run of this length may not fit into the night; chosen, not measured
_AT_ONCE = 65_536  # requests


@dataclass(frozen=True, slots=True)
class EarlierAnswers:
    """Stored answers to requests of a plan that an earlier version of the job's arithmetic made.

    Attributes:
        answers: Number of requests of the plan that have such an answer.
        made_by: The earlier version, such as "int8 version 1".
        seconds: Forecast engine time of these requests. None if unknown.
    """

    answers: int
    made_by: str
    seconds: float | None = None

    @property
    def text(self) -> str:
        """Return a sentence about the answers and the time in which they are computed again."""
        does = "was made by {} and runs" if self.answers == 1 else "were made by {} and run"
        took = "" if self.seconds is None else f": about {rough_duration(self.seconds)}"
        long = self.seconds is not None and self.seconds >= _LONG_S
        spread = "; --stop-at spreads this over several nights" if long else ""
        return f"{counted(self.answers, 'stored answer')} {does.format(self.made_by)} again{took}{spread}"


def earlier_answers(
    setup: Setup,
    state: StateFolder,
    plan: Plan,
    prompts: Prompts,
    parts: Sequence[Path],
    forecast: EngineForecast | None,
) -> EarlierAnswers | None:
    """Find the requests of a plan whose answers are stored under the work keys of earlier versions of the arithmetic.

    Only the version differs: model, prompt and parameters are the same. Equal sampled requests count if the first of
    them has such an answer.

    Args:
        setup: The job's model, tokenizer and setting.
        state: The job's state folder.
        plan: The plan.
        prompts: The token ids of all prompts.
        parts: Parquet files of the store.
        forecast: The forecast of the plan's engine time. None if unknown.

    Returns:
        The answers, or None if there are none.

    Raises:
        StorageError: The plan or the store cannot be read.
    """
    numerics = setup.setting.numerics
    if numerics.version == 1 or not parts or not plan.to_run:
        return None
    versions = range(1, numerics.version)
    contexts = [work_context(setup, state, version=one) for one in versions]
    stored, answers, found = StoredKeys(parts), 0, np.zeros(len(contexts), np.bool_)
    for batch in plan.batches(_AT_ONCE):
        has = np.stack([_are_stored(batch, prompts, context, stored) for context in contexts])
        answers += int(np.count_nonzero(has.any(axis=0)))
        found |= has.any(axis=1)
    if not answers:
        return None
    numbers = " or ".join(str(one) for one in np.asarray(versions)[found])
    made_by = f"{coded_text(numerics.quantization)} version {numbers}"
    seconds = None if forecast is None else forecast.seconds
    return EarlierAnswers(answers, made_by, None if seconds is None else seconds * answers / plan.to_run)


def _are_stored(batch: PlanBatch, prompts: Prompts, context: bytes, stored: StoredKeys) -> NDArray[np.bool_]:
    return stored.has(key_starts(b"".join(_keys(batch, prompts, context))))


def _keys(batch: PlanBatch, prompts: Prompts, context: bytes) -> Iterator[bytes]:
    keys_of, params, sizes = cache(partial(WorkKeys, context)), batch.params, batch.numbers("token_count")
    for some, tokens, starts in read_together(prompts, batch.numbers("token_offset"), sizes):
        data = token_bytes(tokens)
        places = zip((TOKEN_BYTES * starts).tolist(), (TOKEN_BYTES * sizes[some]).tolist(), strict=True)
        for text, (start, size) in zip(params[some], places, strict=True):
            yield keys_of(text).key(data[start : start + size])
