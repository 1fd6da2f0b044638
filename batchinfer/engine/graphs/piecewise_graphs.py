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
    """A decoder that can run in pieces, with the attention of each layer launched by the caller."""

    def forward_split_at_attention(
        self, token_ids: Tensor, inputs: Seq[AttentionInputs], caches: Seq[LayerCache]
    ) -> Generator[AttentionBoundary, Tensor | None, Tensor]:
        """Run a forward pass and pause before each layer's attention.

        Args:
            token_ids: [T], the tokens of the step.
            inputs: The step's attention inputs per cache group.
            caches: The KV cache of each layer with attention.

        Yields:
            The attention that the caller must launch. Its result must be sent to the generator.

        Returns:
            The hidden states after the last layer, [T, hidden].
        """

    def static_buffers(self, tokens: int) -> StaticBuffers:
        """Allocate the buffers through which pieces and attention of up to `tokens` tokens exchange tensors."""


def token_sizes(most: int) -> list[int]:
    """Return the step sizes to capture, in tokens: 64, 128, 256, 320, 384, 448, 512, 640, … and `most`.

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
    """Return the estimated bytes of device memory of all piecewise graphs, without their tensors.

    Args:
        tokens: The largest captured step size in tokens.
        layers: The number of layers with attention.
    """
    return len(token_sizes(tokens)) * (layers + 1) * GRAPH_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class _AttentionCall:
    """The attention that the host launches after a captured piece.

    Attributes:
        attention: The attention of the layer.
        cache: The KV cache of the layer.
        shapes: The shapes per token of the queries and of the result, as heads and head size.
    """

    attention: AttentionHalf
    cache: LayerCache
    shapes: tuple[tuple[int, int], tuple[int, int]]

    @classmethod
    def of(cls, boundary: AttentionBoundary) -> _AttentionCall:
        """Create the call for the attention at which a forward pass paused: the `boundary`.

        The call refers to no tensor of queries, because later pieces reuse their memory.
        """
        heads, dim = boundary.queries.shape[1:]
        attended = boundary.attention.widths[1] // heads
        return cls(boundary.attention, boundary.cache, ((heads, dim), (heads, attended)))


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """The captured pieces of steps of one size.

    Attributes:
        lines: The device inputs of the graphs: token ids, positions, and the slots of each cache group.
        replays: Replays each piece, in order: one more than there are layers with attention.
        attention: The attention between two pieces, in order.
    """

    lines: Upload
    replays: list[Replay]
    attention: list[_AttentionCall]


class PiecewiseGraphs:
    """Captures the parts of a step between two layers' attention as CUDA graphs, and replays them.

    Steps are padded to one of a few sizes. The host launches attention between two graphs.

    Args:
        model: The model.
        caches: The KV cache of each layer with attention.
        groups: The number of cache groups.
        padding_slot: The KV cache slot that receives the keys and values of padding tokens.
        buffers: The buffers through which graphs and attention exchange tensors. Their size limits the size of a step.
        recorder: Captures the pieces.
        in_group: True if other ranks capture the same pieces at the same time.
        after_step: Called after the last piece of each step with the step's attention inputs per cache group.
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
        """Capture steps of all sizes, largest first, because smaller sizes reuse the memory of larger sizes.

        Sizes without enough memory are skipped. If a piece cannot be captured at all, no further sizes are tried.

        Raises:
            torch.OutOfMemoryError: In a group of ranks, which must capture the same sizes.
            NotCaptured: In a group of ranks.
        """
        began = time.perf_counter()
        refused: list[int] = []
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
        """Return True if `run` accepts a step of `tokens` tokens: a captured size is large enough."""
        return bool(self.sizes) and tokens <= self.sizes[-1]

    def run(
        self, batch: HostBatch, tables: DeviceTables, fill_in: Callable[[Tensor], None], plan: Planned
    ) -> RanStep:
        """Run a step for which `covers` is True, and return its hidden states.

        Args:
            batch: The inputs of the step.
            tables: The block tables on the device, with all entries of this step.
            fill_in: Writes the token ids that only the device knows into a tensor of the step's token ids.
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
        """Run the model piece by piece, and return the attention calls between the pieces.

        Attention is not launched: the next piece reads whatever the buffers contain.

        Args:
            lines: The inputs of the graphs.
            run: Runs or captures a piece, and returns the piece's result.
        """
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
            sent = self._views(own, len(token_ids))[1]
        return found

    def _piece(
        self, forward: Generator[AttentionBoundary, Tensor | None, Tensor], sent: Tensor | None, size: int
    ) -> _AttentionCall | None:
        """Run a forward pass up to the next attention and return its call, or None at the end of the pass.

        Args:
            forward: The forward pass, which pauses before each attention.
            sent: The result of the attention at which the pass paused, or None at its beginning.
            size: The number of tokens of the step.
        """
        try:
            boundary = forward.send(sent)
        except StopIteration as end:
            self._buffers.hidden[:size].copy_(end.value)
            return None
        own = _AttentionCall.of(boundary)
        self._views(own, size)[0].copy_(boundary.queries)
        return own

    def _views(self, own: _AttentionCall, tokens: int) -> tuple[Tensor, Tensor]:
        """Return views of the buffers for the queries and the results of an attention call, for `tokens` tokens."""
        (heads, dim), (_, attended) = own.shapes
        return (
            self._buffers.queries[: tokens * heads * dim].view(tokens, heads, dim),
            self._buffers.attended[: tokens * heads * attended].view(tokens, heads, attended),
        )


def _padded(batch: HostBatch, size: int, padding_slot: int) -> list[NDArray[Any]]:
    slots = (pad_array(own, (size,), padding_slot) for own in batch.slots)
    return [pad_array(batch.token_ids, (size,)), pad_array(batch.positions, (size,)), *slots]
