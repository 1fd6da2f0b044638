"""Measures how much quantisation changes the predictions of a model on prompts of the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from batchinfer.core.errors import Unavailable
from batchinfer.core.sampling import Pooling
from batchinfer.core.statistics.quality import Quality
from batchinfer.engine.config import QualityOrder
from batchinfer.engine.load.process_setup import set_up_process
from batchinfer.models.calibration.layered import LOGIT_ROWS, LayeredModel, compare_logits
from batchinfer.models.calibration.sample import SampledStep, SampleRows
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.sources import ModelSource, checkpoint_source
from batchinfer_kernels.arithmetic import KvCacheDtype, Quantization

MAX_POSITIONS = 2048  # at which logits are compared, evenly spaced


def measure_quality(order: QualityOrder, on_progress: Callable[[int, int], None]) -> Quality:
    """Run the unquantised and the quantised model, layer by layer, and compare their predictions.

    Args:
        order: The quantised model, and the prompts.
        on_progress: Called with the number of finished layers and of all layers of both models.

    Raises:
        Unavailable: A model cannot be computed. Errors of loading a model are raised as well.
    """
    device, _ = set_up_process(order.load)
    arithmetic = Arithmetic(
        getattr(torch, order.load.dtype),
        device,
        order.load.deterministic,
        order.load.tiles,
        order.load.kv_cache,
    )
    rows = SampleRows.of((prompt, 1) for prompt in order.prompts)
    steps = list(rows.steps(device))
    sources = (_source(order, "none", "auto"), _source(order, order.load.quantization, order.load.kv_cache))
    done, count = 0, sum(len(source.spec.layers) for source in sources)
    on_progress(0, count)

    def finish_layer() -> None:
        nonlocal done
        done += 1
        on_progress(done, count)

    models, states = [], []
    with torch.inference_mode():
        for source in sources:
            with source.open_layers(arithmetic) as weights:
                ops = source.choose_ops(arithmetic)
                model = LayeredModel(source.spec, weights, ops, arithmetic.dtype, steps)
                states.append(model.final_states(finish_layer))
            models.append(model.ends)
        if order.pooling is not None:
            exact, rounded = (
                torch.cat(list(_pooled(order.pooling, steps, [end.states(one) for one in of])))
                for end, of in zip(models, states, strict=True)
            )
            cosine = torch.nn.functional.cosine_similarity(exact, rounded).mean()
            return Quality(None, None, len(exact), float(cosine))
        found = compare_logits(models, _compared_states(steps, states))
    assert found is not None, "there is a prompt"
    return found


def _source(order: QualityOrder, quantization: Quantization, kv_cache: KvCacheDtype) -> ModelSource:
    source = checkpoint_source(order.load.model, kv_cache, quantization, order.load.adapters)
    if not isinstance(source, ModelSource):
        raise Unavailable("the quality of a model that transformers' code computes is not measured")
    return source


def _compared_states(
    steps: Sequence[SampledStep], states: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield hidden states of both models, in batches, at tokens that a row does not share with the row before.

    Of more than MAX_POSITIONS such tokens, evenly spaced ones are used.
    """
    stride = -(-sum(int(step.counted.sum()) for step in steps) // MAX_POSITIONS)
    for step, *both in zip(steps, *states, strict=True):
        at = step.counted.nonzero()[::stride, 0]
        exact, rounded = (torch.split(one[at], LOGIT_ROWS) for one in both)
        yield from zip(exact, rounded, strict=True)


def _pooled(pooling: Pooling, steps: Sequence[SampledStep], states: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the pooled vectors of the rows of each step, (rows, hidden) float32."""
    for step, of in zip(steps, states, strict=True):
        lengths = step.inputs.context_lens
        rows = torch.split(of.float(), list(lengths))
        if pooling == "mean":
            yield torch.stack([row.mean(0) for row in rows])
        else:
            at = 0 if pooling == "cls" else -1
            yield torch.stack([row[at] for row in rows])
