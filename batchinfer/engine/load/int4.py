"""A model is calibrated for int4: it answers some prompts of its job, rounded as it would be without a calibration, and
what it has read and written is what its weights are then made for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import numpy as np
import torch

from batchinfer.core.request import Request, TokenIds
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.config import CalibrationOrder, EngineConfig
from batchinfer.engine.load.build import load_model
from batchinfer.engine.load.settling import settled
from batchinfer.models.calibration.folder import CalibratedFolder, sync
from batchinfer.models.calibration.sample import SampleRows
from batchinfer.models.calibration.search import Search
from batchinfer.models.calibration.work import HELD_OUT_OF, STEP_TOKENS, CalibrationOutcome
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.sources import checkpoint_source

_HELD_OUT = HELD_OUT_OF - 1  # which one
_KEY_BYTES = 32


def calibrated(order: CalibrationOrder, told: Callable[[int, int], None]) -> CalibrationOutcome:
    """Write the checkpoint, and return what that has come to. `told` gets how many of the model's layers are done, and
    how many there are; none of them once again where the first one begins, behind the answers.

    Raises what loading a model raises, and OSError.
    """
    device, _ = settled(order.load)
    checkpoint = inspect_checkpoint(order.load.model)
    count = len(checkpoint.spec.layers)
    told(0, count)
    answers = _answers(order)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of the engine that has answered, its cache and its graphs
    rows = [(np.concatenate(row), len(row[0])) for row in zip(order.prompts, answers, strict=True)]
    split = [
        [row for at, row in enumerate(rows) if (at % HELD_OUT_OF == _HELD_OUT) is held]
        for held in (False, True)
    ]
    source = checkpoint_source(order.load.model, quantization="int4")
    dtype = getattr(torch, order.load.dtype)
    ops = source.choose_ops(Arithmetic(dtype, device))
    samples = (SampleRows.of(split[0]), SampleRows.of(split[1]))
    search = Search(checkpoint, ops, dtype, samples, device, order.group, order.adapted)
    told(0, count)
    written = CalibratedFolder(order.folder, checkpoint, order.group, order.adapted)
    for index, layer in enumerate(search.layers()):
        written.add(index, layer)
        told(index + 1, count)
    written.finish()
    sync(order.folder)
    return search.outcome()


def _answers(order: CalibrationOrder) -> Sequence[TokenIds]:
    """Return the most likely answer to each prompt, without the token that ends it."""
    nothing = np.empty(0, np.int32)
    if not order.answer_tokens:
        return [nothing for _ in order.prompts]
    longest = max(map(len, order.prompts)) + order.answer_tokens
    # No more than there is to do: what the device warms up for, and captures, depends on it
    step = min(STEP_TOKENS, sum(map(len, order.prompts)))
    loaded = load_model(EngineConfig(order.load, longest, longest, len(order.prompts), step))
    params = SamplingParams(max_tokens=order.answer_tokens)
    engine, found = loaded.engine(), dict.fromkeys(range(len(order.prompts)), nothing)
    engine.add(
        [
            Request(at.to_bytes(_KEY_BYTES, "little"), prompt, params)
            for at, prompt in enumerate(order.prompts)
        ]
    )
    for output in engine.drain():
        for completion in output.completions:
            ids, ended = completion.tokens.token_ids, completion.finish_reason == "stop"
            found[int.from_bytes(completion.key, "little")] = ids[:-1] if ended else ids
    del engine, loaded
    gc.collect()
    return list(found.values())
