"""Calibrates a model for int4.

The model, quantised without calibration, answers sample prompts of the job. Prompts and answers are the calibration
data.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import numpy as np
import torch

from batchinfer.core.request import Request, TokenIds
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.config import CalibrationOrder, EngineConfig
from batchinfer.engine.load.build import load_model
from batchinfer.engine.load.process_setup import set_up_process
from batchinfer.models.calibration.folder import CalibratedFolder, sync
from batchinfer.models.calibration.sample import SampleRows
from batchinfer.models.calibration.search import Search
from batchinfer.models.calibration.work import HELD_OUT_OF, STEP_TOKENS, CalibrationOutcome
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.sources import checkpoint_source

_HELD_OUT = HELD_OUT_OF - 1  # of HELD_OUT_OF rows in order, this one is held out to measure the loss
_KEY_BYTES = 32


def calibrate_int4(order: CalibrationOrder, on_progress: Callable[[int, int], None]) -> CalibrationOutcome:
    """Choose int4 weights for a model with the help of sample prompts, and write the int4 checkpoint.

    The model answers the prompts first. The weights are then chosen to change the results for prompts and answers as
    little as possible.

    Args:
        order: The model, the sample prompts and the output folder.
        on_progress: Called with (number of finished layers, number of all layers). It is called with (0, n) before the
            answers are generated and before the first layer, then after each layer.

    Returns:
        The results of the calibration, such as the loss on sample prompts that the calibration did not use.

    Raises:
        OSError: Writing failed. Errors of loading a model are raised as well.
    """
    device, _ = set_up_process(order.load)
    checkpoint = inspect_checkpoint(order.load.model)
    count = len(checkpoint.spec.layers)
    on_progress(0, count)
    answers = _answers(order)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # release the KV cache and graphs of the engine that generated the answers
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
    on_progress(0, count)
    written = CalibratedFolder(order.folder, checkpoint, order.group, order.adapted)
    for index, layer in enumerate(search.layers()):
        written.add(index, layer)
        on_progress(index + 1, count)
    written.finish()
    sync(order.folder)
    return search.outcome()


def _answers(order: CalibrationOrder) -> Sequence[TokenIds]:
    nothing = np.empty(0, np.int32)
    if not order.answer_tokens:
        return [nothing for _ in order.prompts]
    longest = max(map(len, order.prompts)) + order.answer_tokens
    # No more than all prompts: warm-up and captured graphs grow with it
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
