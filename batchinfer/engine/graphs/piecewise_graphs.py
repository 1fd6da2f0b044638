"""Piecewise CUDA graphs: the pieces of a step between two layers' attention are captured and replayed.

The kernels of a step depend only on its number of tokens. So a step with prompts is padded to one of a
few sizes, and its pieces are replayed. Between two pieces, the host launches attention with the step's own
plan. The keys of padding tokens are written to a block that no sequence uses, and their rows are never sampled.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.graphs.graph_capture import GraphRecorder, NotCaptured, Replay
from batchinfer.engine.tensors.batch import HostBatch, RanStep
from batchinfer.engine.tensors.device_tables import DeviceTables
from batchinfer.engine.tensors.graph_inputs import pad_array
from batchinfer.engine.tensors.staging import Upload, upload
from batchinfer.models.decoder.attention import AttentionBoundary, AttentionHalf, StaticBuffers
from batchinfer.models.ops.attention import AttentionInputs, AttentionPlan, LayerCache

_log = logging.getLogger(__name__)

# Captured numbers of tokens: powers of two from FEWEST to EVEN, because so small steps are bound by reading the
# weights, then PARTS sizes per power of two: a step is padded by a quarter at most, and by a tenth on average
FEWEST, EVEN, PARTS = 64, 256, 4

# Bytes per graph, without its tensors. Not measured here: vLLM reports 0.59 GiB for 67 sizes of a model with
# 28 layers, 29 pieces each, tensors included (https://github.com/vllm-project/vllm/pull/21146)
GRAPH_BYTES = 320 << 10

Planned = Callable[[list[AttentionInputs]], list[AttentionPlan]]


@runtime_checkable
class SplitModel(Protocol):
    """A decoder that can run in pieces. Between two pieces, the caller launches the attention of a layer."""

    def forward_split_at_attention(
        self, token_ids: Tensor, inputs: Seq[AttentionInputs], caches: Seq[LayerCache]
    ) -> Generator[AttentionBoundary, Tensor | None, Tensor]:
        """Run a forward pass as a generator that pauses before each layer's attention.

        Args:
            token_ids: [T], the tokens of the step.
            inputs: The step's attention inputs per cache group.
            caches: The KV cache of each layer with attention.

        Yields:
            The attention that the caller must launch. The caller passes the result of attention to `send()`.

        Returns:
            The hidden states after the last layer, [T, hidden].
        """

    def static_buffers(self, tokens: int) -> StaticBuffers:
        """Allocate the buffers through which captured pieces and attention exchange tensors.

        Args:
            tokens: The number of tokens of the largest step.
        """


def token_sizes(most: int) -> list[int]:
    """Return the step sizes to capture as CUDA graphs, in tokens: 64, 128, 256, 320, 384, 448, 512, 640, … and `most`.

    Args:
        most: The largest size, or 0 to capture no step.
    """
    sizes, size = [], FEWEST
    while size < most:
        sizes.append(size)
        below = 1 << size.bit_length() - 1  # the power of two
        size += below if size < EVEN else below // PARTS
    return [*sizes, most] if most else []


def graph_bytes(tokens: int, layers: int) -> int:
    """Return the estimated device memory in bytes of all piecewise CUDA graphs, without the tensors that they use.

    Args:
        tokens: The number of tokens of the largest step that is captured.
        layers: The number of layers with attention.
    """
    return len(token_sizes(tokens)) * (layers + 1) * GRAPH_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class _AttentionCall:
    """A layer's attention, which the host launches between two captured pieces of a step.

    Attributes:
        attention: The attention of the layer.
        cache: The KV cache of the layer.
        shapes: The shape per token of the queries, and of the result: (heads, head size) each.
    """

    attention: AttentionHalf
    cache: LayerCache
    shapes: tuple[tuple[int, int], tuple[int, int]]

    @classmethod
    def of(cls, boundary: AttentionBoundary) -> _AttentionCall:
        # The call refers to no tensor of queries, because later pieces reuse their memory
        heads, dim = boundary.queries.shape[1:]
        attended = boundary.attention.widths[1] // heads
        return cls(boundary.attention, boundary.cache, ((heads, dim), (heads, attended)))


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """The captured pieces of all steps with the same padded number of tokens.

    Attributes:
        lines: The device inputs of the graphs: token ids, positions, and the KV cache slots of each cache group.
        replays: Per piece, in order, a function that replays it. There is one piece more than layers with attention.
        attention: The attention between two pieces, in order.
    """

    lines: Upload
    replays: list[Replay]
    attention: list[_AttentionCall]


class PiecewiseGraphs:
    """Captures the pieces of a step between the attention of two layers as CUDA graphs, and replays them.

    Steps are padded to one of a few sizes. Between two graphs, the host launches attention.

    Args:
        model: The model.
        caches: The KV cache of each layer with attention.
        groups: The number of cache groups.
        padding_slot: The KV cache slot that receives the keys and values of padding tokens.
        buffers: The buffers through which graphs and attention exchange tensors. Their size limits the size of a step.
        recorder: Captures the pieces.
        in_group: True if the model is sharded, so that other ranks capture the same pieces at the same time.
        after_step: Called after the last piece of each step with the step's attention inputs per cache group. None:
            nothing is called.
    """

    def __init__(
        self,
        model: SplitModel,
        caches: list[LayerCache],
        groups: int,
        padding_slot: int,
        buffers: StaticBuffers,
        recorder: GraphRecorder,
        in_group: bool = False,
        after_step: Callable[[list[AttentionInputs]], None] | None = None,
    ) -> None:
        self._in_group, self._after_step = in_group, after_step
        self._model, self._caches, self._groups = model, caches, groups
        self._padding_slot, self._buffers, self._recorder = padding_slot, buffers, recorder
        self._pieces: dict[int, _Pieces] = {}
        self.sizes: list[int] = []  # captured numbers of tokens, ascending
        self.capture_s = 0.0  # time of all captures in seconds

    @property
    def captured(self) -> int:
        """The number of captured CUDA graphs: the pieces of all step sizes."""
        return sum(len(pieces.replays) for pieces in self._pieces.values())

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the pieces of steps of all sizes, the largest first.

        A size for which memory is missing is skipped. If a piece cannot be captured at all, the remaining sizes are
        not tried.

        Raises:
            torch.OutOfMemoryError: If memory is missing and the model is sharded.
            NotCaptured: If a piece cannot be captured and the model is sharded.
        """
        began = time.perf_counter()
        refused: list[int] = []
        # Largest first: smaller sizes reuse its memory
        for size in reversed(token_sizes(self._buffers.tokens)):
            try:
                self._pieces[size] = self._captured(size)
            except torch.OutOfMemoryError:
                if self._in_group:
                    raise
                refused.insert(0, size)
            except NotCaptured as error:
                if self._in_group:
                    raise
                _log.warning(
                    "steps that read prompts cannot be captured as graphs, and run slower: %s", error
                )
                break
            else:
                self.sizes.insert(0, size)
        self.capture_s += time.perf_counter() - began
        if refused:
            _log.warning(
                "too little GPU memory to capture steps of %s tokens as graphs: they are padded to a larger size that "
                "was captured, or run without a graph, which is slower; lower engine.kv_memory to leave room",
                ", ".join(map(str, refused)),
            )
        _log.info(
            "%d graphs of steps of %d sizes took %.1f s to capture",
            self.captured,
            len(self.sizes),
            self.capture_s,
        )

    def covers(self, tokens: int) -> bool:
        """Return True if `run` accepts a step of `tokens` tokens, because a captured size is large enough."""
        return bool(self.sizes) and tokens <= self.sizes[-1]

    def run(
        self, batch: HostBatch, tables: DeviceTables, fill_in: Callable[[Tensor], None], plan: Planned
    ) -> RanStep:
        """Run a step for which `covers` is True, and return its hidden states.

        Args:
            batch: The inputs of the step.
            tables: The block tables on the device, with all entries that this step needs.
            fill_in: Called with the tensor of the step's token ids, to write the ids that only the device knows.
            plan: Returns the attention plan of each cache group from the step's attention inputs.
        """
        tokens = len(batch.token_ids)
        size = self.sizes[bisect_left(self.sizes, tokens)]
        pieces = self._pieces[size]
        pieces.lines.refill(_padded(batch, size, self._padding_slot))
        token_ids, positions, *slots = [line[:tokens] for line in pieces.lines.tensors]
        arrays: list[NDArray[Any]] = [batch.sampled_rows, batch.table_rows, *batch.parts]
        sampled, rows, *parts = upload(arrays, token_ids.device)
        fill_in(token_ids)
        inputs = batch.inputs(tables.of(batch.tables, rows), positions, slots, parts)
        plans = plan(inputs)
        views = {own.shapes: self._views(own, tokens) for own in pieces.attention}
        *before, last = pieces.replays
        for replay, own in zip(before, pieces.attention, strict=True):
            replay()
            (queries, attended), group = views[own.shapes], own.cache.group
            own.attention.attend(queries, inputs[group], own.cache, plans[group], attended)
        last()
        if self._after_step is not None:
            self._after_step(inputs)
        hidden, padded = self._buffers.hidden, size - tokens + plans[0].padded_tokens
        return RanStep(hidden, hidden.index_select(0, sampled), padded)

    def _captured(self, size: int) -> _Pieces:
        device = self._buffers.hidden.device
        zeros, slots = np.zeros(size, np.int64), np.full(size, self._padding_slot)
        lines = Upload([zeros, zeros, *[slots] * self._groups], device)
        self._recorder.warm_up(lambda: self._driven(lines, lambda piece: piece()))
        replays: list[Replay] = []

        def recorded(piece: Callable[[], _AttentionCall | None]) -> _AttentionCall | None:
            own, replay = self._recorder.record(piece)
            replays.append(replay)
            return own

        attention = self._driven(lines, recorded)
        return _Pieces(lines, replays, attention)

    def _driven(
        self, lines: Upload, run: Callable[[Callable[[], _AttentionCall | None]], _AttentionCall | None]
    ) -> list[_AttentionCall]:
        token_ids, positions, *slots = lines.tensors
        # No piece reads a block table
        no_table = torch.zeros((0, 0), dtype=torch.int32, device=token_ids.device)
        inputs = [
            AttentionInputs(positions, own, no_table, [], [], None, self._padding_slot) for own in slots
        ]
        forward = self._model.forward_split_at_attention(token_ids, inputs, self._caches)
        found: list[_AttentionCall] = []
        sent: Tensor | None = None
        while (own := run(partial(self._piece, forward, sent, len(token_ids)))) is not None:
            found.append(own)
            # Attention is not launched: the values of captured inputs do not matter
            sent = self._views(own, len(token_ids))[1]
        return found

    def _piece(
        self, forward: Generator[AttentionBoundary, Tensor | None, Tensor], sent: Tensor | None, size: int
    ) -> _AttentionCall | None:
        try:
            boundary = forward.send(sent)
        except StopIteration as end:
            self._buffers.hidden[:size].copy_(end.value)
            return None
        own = _AttentionCall.of(boundary)
        self._views(own, size)[0].copy_(boundary.queries)
        return own

    def _views(self, own: _AttentionCall, tokens: int) -> tuple[Tensor, Tensor]:
        (heads, dim), (_, attended) = own.shapes
        return (
            self._buffers.queries[: tokens * heads * dim].view(tokens, heads, dim),
            self._buffers.attended[: tokens * heads * attended].view(tokens, heads, attended),
        )


def _padded(batch: HostBatch, size: int, padding_slot: int) -> list[NDArray[Any]]:
    slots = (pad_array(own, (size,), padding_slot) for own in batch.slots)
    return [pad_array(batch.token_ids, (size,)), pad_array(batch.positions, (size,)), *slots]
