"""Compiled operators with the signatures of their references, for contiguous float32 and bfloat16 CPU tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchinfer_kernels.cpu.attention_plan import CachePages, Items
from batchinfer_kernels.cpu.build import CODES, load_library
from batchinfer_kernels.cpu.cached import MAX_HEAD_DIM as MAX_HEAD_DIM
from batchinfer_kernels.cpu.cached import SUFFIX, CachedOperators, function_of
from batchinfer_kernels.cpu.cached import WORD_BYTES as WORD_BYTES
from batchinfer_kernels.cpu.experts import ExpertsRoom, wide_room
from batchinfer_kernels.cpu.low_rank import (
    AdaptedRoom,
    PackedLowRank,
    check_adapted_rows,
    count_without_adapter,
    with_added_values,
)
from batchinfer_kernels.cpu.memory import HugePages, zeros_in_huge_pages
from batchinfer_kernels.cpu.packed_weights import (
    KINDS,
    Kind,
    PackedExperts,
    PackedWeight,
    codes_room,
    is_gated,
    padded,
    scales_room,
)
from batchinfer_kernels.cpu.structures import (
    LOG2_E,
    AdaptedStructure,
    ExpertsStructure,
    Latent,
    LowRankStructure,
    Weight,
    address,
)
from batchinfer_kernels.experts import Choice, check_choice
from batchinfer_kernels.int4_linear import SHARES, quantize_groups
from batchinfer_kernels.latent_attention import check_latent_attention
from batchinfer_kernels.low_rank import AdaptedRows
from batchinfer_kernels.mask import check_mask
from batchinfer_kernels.mxfp4 import GROUP, check_mxfp4
from batchinfer_kernels.quantized_linear import hadamard_size
from batchinfer_kernels.rms_norm import check_rms_norm
from batchinfer_kernels.tiles import TileWay

# Data of an int4 weight's columns: scales of groups, and zero points of groups, if it has any
Columns = tuple[Tensor, Tensor | None]
_GREATEST = 3
_MAX_GROUP = 256  # the largest group that round_int4 supports
_POINTER, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_WEIGHT = ctypes.POINTER(Weight)
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [_POINTER] * 5 + [_LONG] * 2 + [_FLOAT] * 2,
    "layer_norm": [_POINTER] * 6 + [_LONG] * 2 + [_FLOAT],
    "gate": [_POINTER] * 2 + [_LONG] * 3,
    "activate": [_POINTER] * 2 + [_LONG] * 3,
    "pack_linear": [_POINTER] + [_LONG] * 3 + [_POINTER],
    "round_int8": [_POINTER] + [_LONG] * 3 + [_POINTER] * 2,
    "pack_int8": [_POINTER] + [_LONG] * 4 + [_POINTER] * 3,
    "round_int4": [_POINTER] + [_LONG] * 4 + [_POINTER] * 4,
    "linear": [_POINTER, _WEIGHT, _POINTER] + [_LONG] * 2,
    "quantized_linear": [_POINTER, _WEIGHT] + [_POINTER] * 3 + [_LONG] * 2,
    "grouped_linear": [_POINTER, _WEIGHT, _POINTER, _LONG] + [_POINTER] * 5 + [_LONG] * 2,
    "experts": [ctypes.POINTER(ExpertsStructure)],
    "low_rank": [_POINTER, ctypes.POINTER(LowRankStructure), ctypes.POINTER(AdaptedStructure), _LONG],
    "layer_widens": [],
    "latent_tile": [],
    "latent_room": [_LONG] * 2,
    "latent_attention": [ctypes.POINTER(Latent), _POINTER],
}
# Functions that do not depend on the dtype: arguments and result
_COMMON: dict[str, tuple[list[Any], Any]] = {
    "has_tiles": ([], _LONG),
    "lanes": ([], _LONG),
    "most_rows": ([], _LONG),
    "packed_columns": ([_LONG, _LONG], _LONG),
    "packed_order": ([_LONG, _LONG, _POINTER], None),
    "pack_codes": ([_POINTER] + [_LONG] * 3 + [_POINTER] * 2, None),
    "pack_int4": ([_POINTER] + [_LONG] * 3 + [_POINTER], None),
    "put_int4": ([_POINTER] * 2 + [_LONG] * 5 + [_POINTER], None),
    "int4_columns": ([_POINTER] + [_LONG] * 3 + [_POINTER], None),
    "ranked_columns": ([_POINTER] * 2 + [_LONG], None),
    "cap_logits": ([_POINTER, _LONG, _LONG, _FLOAT], None),
    "mask_logits": ([_POINTER, _LONG, _POINTER, _LONG, _POINTER, _LONG], None),
    "masked_argmax": ([_POINTER, _LONG, _LONG, _POINTER, _LONG, _POINTER, _POINTER], None),
}
_RESULTS: dict[str, Any] = {
    "experts": _LONG,
    "layer_widens": _LONG,
    "latent_tile": _LONG,
    "latent_room": _LONG,
}


class CompiledOperators(CachedOperators):
    """The compiled CPU operators, for contiguous float32 and bfloat16 tensors.

    The constructor loads the library, and builds it first if it does not exist.

    Args:
        cache: folder of the libraries, `cache_folder()` by default.
        tiles: instructions of matrix products. None: AMX tiles if the system permits them and the compiler supports
            them.
        codes: True to load the operators for a quantised cache too.

    Raises:
        NoCompiler: If the library cannot be built or loaded.
    """

    def __init__(self, cache: Path | None = None, tiles: TileWay | None = None, codes: bool = False) -> None:
        library = load_library(cache, tiles)
        self._common = {name: function_of(library, name, *types) for name, types in _COMMON.items()}
        self.has_tiles = bool(self._common["has_tiles"]())
        # The most queries × query heads per KV head of an attention item
        self.most_rows = int(self._common["most_rows"]())
        self._pages = HugePages()
        lanes, tile = int(self._common["lanes"]()), int(self._common["packed_columns"](1, 0))
        functions = {
            (name, dtype): function_of(library, name + suffix, arguments, _RESULTS.get(name))
            for name, arguments in _SIGNATURES.items()
            for dtype, suffix in SUFFIX.items()
        }
        kept = load_library(cache, tiles, CODES) if codes else None
        super().__init__(lanes, tile, library, kept, functions)

    def pack_linear(self, weight: Tensor, bias: Tensor | None, kind: Kind = "plain") -> PackedWeight:
        """Pack a weight that is not quantised for `linear`.

        Args:
            weight: (outputs, inputs); for a gated kind, the gate's rows above the rows of up.
            bias: (outputs,), or None.
            kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.

        Raises:
            ValueError: If shapes do not match.
        """
        outputs, inputs = _check_weight(weight, bias, kind)
        order = self._order(outputs, kind)
        size = len(order) * padded(inputs * weight.element_size()) // weight.element_size()
        panels = self._pages.zeros(size, weight.dtype)
        self._call("pack_linear", weight, weight.contiguous(), outputs, inputs, is_gated(kind), panels)
        return PackedWeight(panels, _reordered(bias, order), (outputs, inputs), kind)

    def round_int8(self, weight: Tensor, hadamard: bool = False) -> tuple[Tensor, Tensor]:
        """Quantise a weight to int8 with one scale per output, as `quantize_weight` does.

        Args:
            weight: (outputs, inputs).
            hadamard: True to quantise the Hadamard transform of the weight.

        Returns:
            Quantised values (outputs, inputs) int8, and scales (outputs,) float32.
        """
        outputs, inputs = _check_weight(weight, None, "plain")
        codes = zeros_in_huge_pages((outputs, inputs), torch.int8)
        scales = torch.empty(outputs, dtype=torch.float32)
        block = hadamard_size(inputs) if hadamard else 0
        self._call("round_int8", weight, weight.contiguous(), outputs, inputs, block, codes, scales)
        return codes, scales

    def pack_codes(
        self,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        kind: Kind = "plain",
        hadamard: bool = False,
    ) -> PackedWeight:
        """Pack an int8 weight for `linear`.

        Args:
            codes: (outputs, inputs) int8.
            scales: (outputs,) float32.
            bias: (outputs,), or None.
            kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.
            hadamard: True if the weight was transformed; see `quantize_weight`.
        """
        outputs, inputs = _check_weight(codes, bias, kind)
        order = self._order(outputs, kind)
        panels = self._pages.zeros(len(order) * padded(inputs), torch.int8)
        starts = torch.empty(len(order), dtype=torch.int32)
        arguments = (codes.contiguous().data_ptr(), outputs, inputs, is_gated(kind))
        self._common["pack_codes"](*arguments, panels.data_ptr(), starts.data_ptr())
        block = hadamard_size(inputs) if hadamard else 0
        columns = starts, _reordered(scales.float(), order)
        return PackedWeight(
            panels, _reordered(bias, order), (outputs, inputs), kind, *columns, hadamard=block
        )

    def pack_rounded_int8(self, weight: Tensor, bias: Tensor | None, kind: Kind = "plain") -> PackedWeight:
        """Quantise the Hadamard transform of a weight to int8 and pack it.

        `round_int8` and `pack_codes` give the same bits.

        Args:
            weight: (outputs, inputs).
            bias: (outputs,), or None.
            kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.
        """
        shape, order = _check_weight(weight, bias, kind), self._order(len(weight), kind)
        panels = self._pages.zeros(len(order) * padded(shape[1]), torch.int8)
        columns, block = self._rounded_int8(weight, kind, panels), hadamard_size(shape[1])
        return PackedWeight(panels, _reordered(bias, order), shape, kind, *columns, hadamard=block)

    def pack_rounded_expert_int8(
        self, weight: Tensor, bias: Tensor | None, kind: Kind = "plain"
    ) -> PackedExperts:
        """Quantise the weights of several experts to int8 and pack them, each as `pack_rounded_int8` does.

        Args:
            weight: (experts, outputs, inputs).
            bias: (experts, outputs), or None.
            kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.
        """
        shape = count, outputs, inputs = _check_experts(weight, bias, kind)
        order = self._order(outputs, kind)
        panels = self._pages.zeros(count * len(order) * padded(inputs), torch.int8).view(count, -1)
        columns = [self._rounded_int8(weight[e], kind, panels[e]) for e in range(count)]
        starts, scales = (torch.stack(each) for each in zip(*columns, strict=True))
        made, block = (starts, scales), hadamard_size(inputs)
        return PackedExperts(panels, _reordered(bias, order), shape, kind, *made, hadamard=block)

    def _rounded_int8(self, weight: Tensor, kind: Kind, panels: Tensor) -> tuple[Tensor, Tensor]:
        (outputs, inputs), gated = weight.shape, is_gated(kind)
        columns = int(self._common["packed_columns"](outputs, gated))
        starts, scales = torch.empty(columns, dtype=torch.int32), torch.empty(columns)
        sizes, made = (outputs, inputs, gated, hadamard_size(inputs)), (panels, starts, scales)
        self._call("pack_int8", weight, weight.contiguous(), *sizes, *made)
        return starts, scales

    def pack_int4(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        group: int,
        bias: Tensor | None,
        kind: Kind = "plain",
    ) -> PackedWeight:
        """Pack an int4 weight for `linear`.

        Args:
            codes: (outputs, inputs) int8 in -8 … 7.
            scales: (outputs, groups) float32.
            zeros: (outputs, groups) float32, the zero points, or None.
            group: number of inputs that share a scale, a multiple of 8.
            bias: (outputs,), or None.
            kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.

        Raises:
            ValueError: If shapes do not match.
        """
        shape, order = _check_weight(codes, bias, kind), self._order(len(codes), kind)
        panels = self._pages.zeros(len(order) * padded(shape[1]) // 2, torch.uint8)
        columns = self._packed_int4(codes, scales, zeros, group, kind, panels)
        return PackedWeight(panels, _reordered(bias, order), shape, kind, None, *columns, group)

    def pack_rounded_int4(
        self, weight: Tensor, group: int, bias: Tensor | None, kind: Kind = "plain"
    ) -> PackedWeight:
        """Quantise a weight to int4 and pack it, with the same bits as int4_linear.quantize_groups and `pack_int4`.

        Args:
            weight: (outputs, inputs).
            group: number of inputs that share a scale.
            bias: (outputs,), or None.
            kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.

        Raises:
            ValueError: If `weight` is not a matrix of floats.
        """
        shape, order = _check_weight(weight, bias, kind), self._order(len(weight), kind)
        panels = self._pages.zeros(len(order) * padded(shape[1]) // 2, torch.uint8)
        scales = self._rounded_int4(weight, group, kind, panels)
        return PackedWeight(panels, _reordered(bias, order), shape, kind, None, scales, None, group)

    def pack_expert_int4(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        group: int,
        bias: Tensor | None,
        kind: Kind = "plain",
    ) -> PackedExperts:
        """Pack the int4 weights of several experts, each as `pack_int4` does.

        Args:
            codes: (experts, outputs, inputs) int8 in -8 … 7.
            scales: (experts, outputs, groups) float32.
            zeros: (experts, outputs, groups) float32, the zero points, or None.
            group: number of inputs that share a scale, a multiple of 8.
            bias: (experts, outputs), or None.
            kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.
        """

        def packed(expert: int, panels: Tensor) -> Columns:
            own = None if zeros is None else zeros[expert]
            return self._packed_int4(codes[expert], scales[expert], own, group, kind, panels)

        return self._int4_experts(codes, group, bias, kind, packed)

    def pack_rounded_expert_int4(
        self, weight: Tensor, group: int, bias: Tensor | None, kind: Kind = "plain"
    ) -> PackedExperts:
        """Quantise the weights of several experts to int4 and pack them, each as `pack_rounded_int4` does.

        Args:
            weight: (experts, outputs, inputs).
            group: number of inputs that share a scale.
            bias: (experts, outputs), or None.
            kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.
        """
        return self._int4_experts(
            weight,
            group,
            bias,
            kind,
            lambda at, panels: (self._rounded_int4(weight[at], group, kind, panels), None),
        )

    def _int4_experts(
        self,
        weight: Tensor,
        group: int,
        bias: Tensor | None,
        kind: Kind,
        packed: Callable[[int, Tensor], Columns],
    ) -> PackedExperts:
        shape = count, outputs, inputs = _check_experts(weight, bias, kind)
        order = self._order(outputs, kind)
        panels = self._pages.zeros(count * len(order) * padded(inputs) // 2, torch.uint8).view(count, -1)
        scales, zeros = zip(*(packed(e, panels[e]) for e in range(count)), strict=True)
        found = [each for each in zeros if each is not None]
        columns = torch.stack(scales), group, torch.stack(found) if found else None
        return PackedExperts(panels, _reordered(bias, order), shape, kind, None, *columns)

    def _packed_int4(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        group: int,
        kind: Kind,
        panels: Tensor,
    ) -> Columns:
        outputs, inputs = codes.shape
        groups = -(-inputs // group) if group > 0 else 0
        if (
            group % 8
            or scales.shape != (outputs, groups)
            or (zeros is not None and zeros.shape != scales.shape)
        ):
            raise ValueError(f"scales are {tuple(scales.shape)} for {outputs} outputs and groups of {group}")
        codes = codes.contiguous()
        self._common["pack_int4"](codes.data_ptr(), outputs, inputs, is_gated(kind), panels.data_ptr())
        ordered = self._int4_columns(scales, kind)
        return ordered, None if zeros is None else self._int4_columns(-scales * zeros, kind)

    def _rounded_int4(self, weight: Tensor, group: int, kind: Kind, panels: Tensor) -> Tensor:
        # Groups in which two scales have almost equal errors are quantised by the reference, because summing the errors
        # in another order could select the other scale
        outputs, inputs = weight.shape
        if not self.rounds_int4(weight, group):
            return self._packed_int4(*quantize_groups(weight, group), None, group, kind, panels)[0]
        weight, gated = weight.contiguous(), is_gated(kind)
        scales = torch.empty(outputs, inputs // group, dtype=torch.float32)
        doubtful = torch.empty_like(scales, dtype=torch.bool)
        made = (torch.tensor(SHARES, dtype=torch.float32), scales, doubtful, panels)
        self._call("round_int4", weight, weight, outputs, inputs, gated, group, *made)
        asked = doubtful.view(-1).nonzero()[:, 0]
        if len(asked):
            codes, wanted = quantize_groups(weight.view(-1, group)[asked], group)
            scales.view(-1)[asked] = wanted[:, 0]
            shape = (len(asked), outputs, inputs, gated, group)
            places = codes.data_ptr(), asked.data_ptr()
            self._common["put_int4"](*places, *shape, panels.data_ptr())
        return self._int4_columns(scales, kind)

    def rounds_int4(self, weight: Tensor, group: int) -> bool:
        """Return True if compiled code can quantise this weight to int4, False if only the reference can.

        Args:
            weight: (..., inputs).
            group: number of inputs that share a scale.
        """
        lanes, inputs = 2 * self.lanes, weight.shape[-1]
        in_groups = 0 < group <= _MAX_GROUP and not inputs % group and not group % lanes
        return in_groups and weight.dtype in (torch.float32, torch.bfloat16)

    def _int4_columns(self, scales: Tensor, kind: Kind) -> Tensor:
        scales = scales.float().contiguous()
        (outputs, groups), gated = scales.shape, is_gated(kind)
        columns = int(self._common["packed_columns"](outputs, gated))
        ordered = torch.empty(columns // self.tile, groups, self.tile)
        self._common["int4_columns"](scales.data_ptr(), outputs, groups, gated, ordered.data_ptr())
        return ordered

    def pack_experts(self, weight: Tensor, bias: Tensor | None, kind: Kind = "plain") -> PackedExperts:
        """Pack the weights of several experts that are not quantised.

        Args:
            weight: (experts, outputs, inputs).
            bias: (experts, outputs), or None.
            kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.
        """
        count, outputs, inputs = _check_experts(weight, bias, kind)
        order = self._order(outputs, kind)
        size = len(order) * padded(inputs * weight.element_size()) // weight.element_size()
        panels = self._pages.zeros(count * size, weight.dtype).view(count, size)
        for matrix, packed in zip(weight, panels, strict=True):
            self._call("pack_linear", weight, matrix.contiguous(), outputs, inputs, is_gated(kind), packed)
        return PackedExperts(panels, _reordered(bias, order), (count, outputs, inputs), kind)

    def pack_expert_codes(
        self,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        kind: Kind = "plain",
        hadamard: bool = False,
    ) -> PackedExperts:
        """Pack the int8 weights of several experts.

        Args:
            codes: (experts, outputs, inputs) int8.
            scales: (experts, outputs) float32.
            bias: (experts, outputs), or None.
            kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.
            hadamard: True if the weights were transformed; see `quantize_weight`.
        """
        count, outputs, inputs = _check_experts(codes, bias, kind)
        order = self._order(outputs, kind)
        panels = self._pages.zeros(count * len(order) * padded(inputs), torch.int8).view(count, -1)
        starts = torch.empty(count, len(order), dtype=torch.int32)
        for expert in range(count):
            arguments = (codes[expert].contiguous().data_ptr(), outputs, inputs, is_gated(kind))
            self._common["pack_codes"](*arguments, panels[expert].data_ptr(), starts[expert].data_ptr())
        columns, block = (starts, _reordered(scales.float(), order)), hadamard_size(inputs) if hadamard else 0
        shape = (count, outputs, inputs)
        return PackedExperts(panels, _reordered(bias, order), shape, kind, *columns, hadamard=block)

    def pack_expert_mxfp4(
        self, codes: Tensor, exponents: Tensor, bias: Tensor | None, kind: Kind = "plain"
    ) -> PackedExperts:
        """Pack the MXFP4 weights of several experts.

        Args:
            codes: (experts, outputs, inputs / 2) uint8, two 4-bit values per byte, the first in the lower bits.
            exponents: (experts, outputs, inputs / 32) uint8, biased by 127.
            bias: (experts, outputs), or None.
            kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.

        Raises:
            ValueError: If shapes or dtypes do not match.
        """
        check_mxfp4(codes, exponents)
        count, outputs, held = _check_experts(codes, bias, kind)
        order = self._order(outputs, kind)
        panels = self._pages.zeros(count * len(order) * held, torch.uint8).view(count, -1)
        for matrix, packed in zip(codes, panels, strict=True):
            packed.copy_(self._by_column(matrix, order).flatten())
        kept = torch.stack([self._by_column(matrix, order) for matrix in exponents])
        shape = (count, outputs, 2 * held)
        return PackedExperts(panels, _reordered(bias, order), shape, kind, scales=kept, group=GROUP)

    def pack_mxfp4(
        self, codes: Tensor, exponents: Tensor, bias: Tensor | None, kind: Kind = "plain"
    ) -> PackedExperts:
        """Pack one MXFP4 weight, as the weight of a single expert.

        Args:
            codes: (outputs, inputs / 2) uint8, two 4-bit values per byte, the first in the lower bits.
            exponents: (outputs, inputs / 32) uint8, biased by 127.
            bias: (outputs,), or None.
            kind: the operation after the product: none ("plain", or "float" for a float32 result) or an activation.
        """
        return self.pack_expert_mxfp4(
            codes[None], exponents[None], None if bias is None else bias[None], kind
        )

    def layer_widens(self, dtype: torch.dtype) -> bool:
        """Return True if `decoder_layer` supports weights in MXFP4 with activations of this dtype."""
        return bool(self._functions["layer_widens", dtype]())

    def _by_column(self, matrix: Tensor, order: Tensor) -> Tensor:
        lines = torch.cat((matrix, matrix.new_zeros(1, matrix.shape[1])))[order]  # -1 selects the zeros
        return lines.view(-1, self.tile, matrix.shape[1]).transpose(1, 2).contiguous()

    def grouped_linear(self, x: Tensor, weight: PackedExperts, starts: Tensor) -> Tensor:
        """Multiply rows sorted by expert by the weights of their experts: (R, columns) in x's dtype.

        Columns are the outputs of the weight, or half of them for a gated kind.

        Args:
            x: (R, inputs).
            weight: weights of a plain or gated kind.
            starts: (experts + 1,) int64, the first row of each expert, and R at the end.
        """
        rows = len(x)
        if x.dim() != 2 or x.shape[1] != weight.inputs:
            raise ValueError(f"x is {tuple(x.shape)}, the weights take {weight.inputs} inputs")
        if starts.shape != (weight.count + 1,) or starts.dtype != torch.int64 or int(starts[-1]) != rows:
            raise ValueError(
                f"starts are {tuple(starts.shape)} {starts.dtype} for {weight.count} weights, {rows} rows"
            )
        y, blocks = x.new_empty(rows, weight.columns), torch.empty_like(starts)
        codes = codes_room(rows if weight.quantized else 0, weight.inputs)
        wide, size = wide_room(x, weight)
        room = (blocks, y, codes, scales_room(len(codes), weight), wide, size)
        self._call("grouped_linear", x, x, weight.structure, starts, weight.count, *room, KINDS[weight.kind])
        return y

    def experts(
        self, x: Tensor, gate_up: PackedExperts, down: PackedExperts, choice: Choice, loads: Tensor
    ) -> Tensor:
        """Return the weighted sum of the results of each token's experts, as `experts_reference` does: (T, outputs).

        Args:
            x: (T, inputs).
            gate_up: gate and up of the experts; its kind determines the activation.
            down: down projections of the experts.
            choice: the experts that each token uses, with their weights.
            loads: (experts,) int64; the number of tokens that use each expert is added to it.

        Raises:
            ValueError: If a chosen expert does not exist.
        """
        check_choice(x, choice)
        room = ExpertsRoom(x, gate_up, down, choice, loads)
        self._checked("experts", x, choice.experts, choice.weights)
        if self._functions["experts", x.dtype](room.structure):
            raise ValueError(f"an expert below 0 or above {gate_up.count - 1} was chosen")
        return room.y

    def pack_factors(
        self, factors: Sequence[tuple[Tensor, Tensor] | None], places: int | None = None
    ) -> PackedLowRank:
        """Pack the LoRA factors of all adapters for one linear layer.

        Args:
            factors: for each adapter, A (rank, inputs) and B (outputs, rank), or None if it does not change the layer.
            places: number of adapters that products can use at a time; `PackedLowRank.place` selects them. None: all.

        Raises:
            ValueError: If no adapter has factors, or shapes do not match.
        """
        known = [own for own in factors if own is not None]
        if not known:
            raise ValueError("no adapter has factors for this product")
        (a, b), packed = known[0], list[tuple[PackedWeight, PackedWeight] | None]()
        for own in factors:
            if own is not None and (own[0].shape[1], own[1].shape) != (a.shape[1], (len(b), len(own[0]))):
                raise ValueError(
                    f"factors are {tuple(own[0].shape)} and {tuple(own[1].shape)}, others {tuple(a.shape)}"
                )
            packed.append(
                None
                if own is None
                else (self.pack_linear(own[0], None), self.pack_linear(own[1], None, "float"))
            )
        return PackedLowRank(packed, len(b), a.shape[1], places)

    def low_rank(self, x: Tensor, factors: PackedLowRank, rows: AdaptedRows) -> Tensor:
        """Return the LoRA product B A x of each token that has an adapter: (n, outputs) float32, sorted by adapter.

        Args:
            x: (T, inputs), all tokens of the step.
            factors: the LoRA factors A and B of all adapters.
            rows: the tokens of the step, sorted by adapter.

        Raises:
            ValueError: If shapes do not match.
        """
        check_adapted_rows(rows, len(x))
        fits = (x.dtype, x.shape[-1], len(rows.starts) - 2) == (factors.dtype, factors.inputs, factors.count)
        if x.dim() != 2 or not fits:
            wanted = f"(T, {factors.inputs}) {factors.dtype} and {factors.count} adapters"
            raise ValueError(
                f"x is {tuple(x.shape)} {x.dtype}, with {len(rows.starts) - 2} adapters; expected {wanted}"
            )
        room = AdaptedRoom(rows, x.dtype, factors.inputs, factors.most_rank, factors.outputs)
        self._call("low_rank", x, x, factors.structure, room.structure, factors.inputs)
        return room.values[: room.count * factors.outputs].view(room.count, factors.outputs)

    def linear(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """Multiply x by a packed weight: (T, columns), float32 if the weight's kind is "float".

        Columns are the outputs of the weight, or half of them for a gated kind. x is quantised per row if the weight is
        quantised to int8 or int4.

        Args:
            x: (T, inputs).
            weight: the packed weight.
        """
        return self._linear(x, weight, weight.structure)

    def adapted_linear(self, x: Tensor, weight: PackedWeight, values: Tensor, rows: AdaptedRows) -> Tensor:
        """Return the result of `linear`, with LoRA products added before the activation.

        Args:
            x: (T, inputs).
            weight: the packed weight.
            values: (n, outputs) float32, returned by `low_rank` for these rows.
            rows: the tokens of the step, sorted by adapter.

        Raises:
            ValueError: If `values` was not returned by `low_rank`: the operator reads one panel beyond its end.
        """
        check_adapted_rows(rows, len(x))
        shape = (len(x) - count_without_adapter(rows), weight.outputs)
        behind = values.untyped_storage().nbytes() // 4 - values.storage_offset() - values.numel()
        made = values.dtype == torch.float32 and values.is_contiguous() and behind >= self.tile
        if values.shape != shape or not made:
            raise ValueError(
                f"values of adapters are {tuple(values.shape)} {values.dtype}, expected {shape} from low_rank"
            )
        return self._linear(x, weight, with_added_values(weight.structure, values, rows))

    def _linear(self, x: Tensor, weight: PackedWeight, structure: Weight) -> Tensor:
        y = torch.empty(len(x), weight.columns, dtype=torch.float32 if weight.kind == "float" else x.dtype)
        self._multiply(x, weight, y, KINDS[weight.kind], structure)
        return y

    def argmax(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """Return the index of the greatest value in each row of x W^T: (T,) int64. The product is not stored.

        Of equal values the first counts. The result is -1 if the greatest value is not finite or any value is NaN.

        Args:
            x: (T, inputs).
            weight: a packed weight of kind "float".
        """
        found = torch.zeros(x.shape[0], dtype=torch.int64)
        self._multiply(x, weight, found, _GREATEST, weight.structure)
        self._common["ranked_columns"](found.data_ptr(), found.data_ptr(), len(found))
        return found

    def _multiply(self, x: Tensor, weight: PackedWeight, y: Tensor, kind: int, structure: Weight) -> None:
        if x.dim() != 2 or x.shape[1] != weight.inputs:
            raise ValueError(f"x is {tuple(x.shape)}, the weight takes {weight.inputs} inputs")
        rows = x.shape[0]
        if isinstance(weight, PackedExperts) and weight.widened:
            starts = torch.tensor([0, rows])
            wide, size = wide_room(x, weight)
            room = (torch.empty_like(starts), y, None, None, wide, size)
            self._call("grouped_linear", x, x, structure, starts, 1, *room, kind)
            return
        if not weight.quantized:
            self._call("linear", x, x, structure, y, rows, kind)
            return
        codes = codes_room(rows, weight.inputs)
        self._call("quantized_linear", x, x, structure, y, codes, scales_room(rows, weight), rows, kind)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return (RMSNorm of x + residual, x + residual), as `rms_norm_reference` does.

        Args:
            x: (..., hidden).
            weight: (hidden,).
            eps: added to the mean square.
            residual: as `x`; None: the second result is x itself.
            offset: added to the weight.
        """
        check_rms_norm(x, weight, residual)
        y, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        rows = x.numel() // max(x.shape[-1], 1)
        self._call("rms_norm", x, x, residual, weight, y, total, rows, x.shape[-1], eps, offset)
        return y, total

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (LayerNorm of x + residual, x + residual), as `layer_norm_reference` does.

        Args:
            x: (..., hidden).
            weight: (hidden,).
            bias: (hidden,), or None.
            eps: added to the variance.
            residual: as `x`; None: the second result is x itself.
        """
        check_rms_norm(x, weight, residual)
        if bias is not None and (bias.shape != weight.shape or bias.dtype != x.dtype):
            raise ValueError(f"bias is {tuple(bias.shape)} of {bias.dtype}, weight {tuple(weight.shape)}")
        y, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        rows = x.numel() // max(x.shape[-1], 1)
        self._call("layer_norm", x, x, residual, weight, bias, y, total, rows, x.shape[-1], eps)
        return y, total

    def gate(self, gate_up: Tensor, kind: Kind) -> Tensor:
        """Return act(gate) * up, the gated activation of a feed-forward layer: (T, width).

        Args:
            gate_up: (T, 2 × width), the gate's values first.
            kind: a gated kind, such as "gated" (SiLU) or "gelu_gated"; it determines act.
        """
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        if gate_up.shape[1] % 2:
            raise ValueError(f"gate and up need an even number of columns, got {gate_up.shape[1]}")
        y = gate_up.new_empty(rows, width)
        self._call("gate", gate_up, gate_up, y, rows, width, KINDS[kind])
        return y

    def activate(self, x: Tensor, kind: Kind) -> Tensor:
        """Return the activation function of each value of x: (T, width).

        Args:
            x: the values.
            kind: the function: "silu", "gelu" or "exact_gelu".
        """
        y = torch.empty_like(x)
        self._call("activate", x, x, y, *x.shape, KINDS[kind])
        return y

    def cap_logits(self, logits: Tensor, cap: float) -> None:
        """Set logits (n, vocab) float32 to cap × tanh(logits / cap), in place."""
        if logits.dim() != 2 or logits.dtype != torch.float32:
            raise ValueError(f"logits are {tuple(logits.shape)} {logits.dtype}, not a matrix of float32")
        self._checked("cap_logits", logits)
        self._common["cap_logits"](logits.data_ptr(), *logits.shape, cap)

    def mask(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """Set the logits of tokens that token masks exclude to -inf, in place.

        Args:
            logits: (any, vocab) float32.
            rows: (n,) int32, the rows of `logits` to mask.
            bits: (n, ceil(vocab / 32)) int32, a mask per row; token t is excluded if bit t % 32 of word t // 32 is 0.
        """
        check_mask(logits, rows, bits)
        if logits.dtype != torch.float32:
            raise ValueError(f"logits are {logits.dtype}, not float32")
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(logits):
            raise ValueError(
                f"rows are {int(rows.min())} … {int(rows.max())}, but there are {len(logits)} rows of logits"
            )
        self._checked("mask", logits, rows, bits)
        self._common["mask_logits"](
            logits.data_ptr(), logits.shape[1], rows.data_ptr(), len(rows), bits.data_ptr(), bits.shape[1]
        )

    def masked_argmax(self, logits: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely allowed token of each row, and whether the mask excludes a likelier one.

        Args:
            logits: (n, vocab) float32.
            bits: (n, ceil(vocab / 32)) int32, a mask per row; token t is excluded if bit t % 32 of word t // 32 is 0.

        Returns:
            Tokens (n,) int64, and (n,) bool, True if the token with the greatest logit is excluded.
        """
        check_mask(logits, torch.empty(len(logits), dtype=torch.int32), bits)
        if logits.dtype != torch.float32:
            raise ValueError(f"logits are {logits.dtype}, not float32")
        self._checked("masked_argmax", logits, bits)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        barred = torch.empty(len(logits), dtype=torch.bool)
        (rows, vocab), words = logits.shape, bits.shape[1]
        self._common["masked_argmax"](
            address(logits), vocab, rows, address(bits), words, address(tokens), address(barred)
        )
        return tokens, barred

    def latent_pages(self, block_size: int, dtype: torch.dtype) -> CachePages:
        """Return how attention divides a cache of latents with blocks of `block_size` tokens into tiles."""
        return CachePages(block_size, 1, self._functions["latent_tile", dtype]())

    def latent_attention(
        self, q: Tensor, cache: Tensor, block_tables: Tensor, items: Items, scale: float, rank: int
    ) -> Tensor:
        """Compute causal attention over a paged cache of latents: (T, heads, rank) in q's dtype.

        Args:
            q: (T, heads, D), the queries of all sequences.
            cache: (blocks, 1, block_size, D). The D values of a token are its key for every head, the first `rank` its
                value.
            block_tables: (sequences, blocks) int32.
            items: from `attention_items`, planned for these tables with `latent_pages`. `items.group` is the number of
                heads that are computed together; it must divide `heads`.
            scale: factor of q · k.
            rank: number of values of V.
        """
        check_latent_attention(q, cache, block_tables, rank)
        (tokens, heads, width), slice_heads = q.shape, items.group
        if heads % slice_heads:
            raise ValueError(f"{heads} heads cannot be cut into slices of {slice_heads}")
        self._checked("latent_attention", q, cache, block_tables)
        out = q.new_empty(tokens, heads, rank)
        state = None if items.levels == 1 else torch.empty(tokens, heads, rank + 2)
        plan = items.structure(block_tables, slice_heads)
        latent = Latent(
            q=address(q),
            cache=address(cache),
            plan=ctypes.pointer(plan),
            state=address(state),
            out=address(out),
            q_heads=heads,
            slice=slice_heads,
            width=width,
            rank=rank,
            block_size=cache.shape[2],
            scale=scale * LOG2_E,
        )
        room = self._functions["latent_room", q.dtype](width, rank)
        self._call("latent_attention", q, latent, torch.empty(torch.get_num_threads(), room))
        return out

    def _order(self, outputs: int, kind: Kind) -> Tensor:
        gated = int(is_gated(kind))
        order = torch.empty(int(self._common["packed_columns"](outputs, gated)), dtype=torch.int64)
        self._common["packed_order"](outputs, gated, order.data_ptr())
        return order


def _check_weight(weight: Tensor, bias: Tensor | None, kind: Kind) -> tuple[int, int]:
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"weight {tuple(weight.shape)} is not a matrix, or its bias does not match")
    if 0 in weight.shape:
        raise ValueError(f"weight {tuple(weight.shape)} is empty")
    if is_gated(kind) and weight.shape[0] % 2:
        raise ValueError(f"gate and up need an even number of rows, got {weight.shape[0]}")
    return weight.shape[0], weight.shape[1]


def _check_experts(weight: Tensor, bias: Tensor | None, kind: Kind) -> tuple[int, int, int]:
    if weight.dim() != 3 or not len(weight) or (bias is not None and bias.shape != weight.shape[:2]):
        raise ValueError(f"weights {tuple(weight.shape)} are not matrices, or their bias does not match")
    return len(weight), *_check_weight(weight[0], None, kind)


def _reordered(values: Tensor | None, order: Tensor) -> Tensor | None:
    if values is None:
        return None
    return torch.cat((values, values.new_zeros(*values.shape[:-1], 1)), -1)[..., order]  # -1 selects the zero
