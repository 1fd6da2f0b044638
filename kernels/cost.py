"""The costs of all operators as integers: the operations they compute and the bytes they must move.

Imports no torch, so the planner and the report can use it. A multiply-add counts as two FLOPs. Bytes count each operand
once. `seconds` is the roofline bound max(flops / peak, bytes / bandwidth) of Williams et al. (2009).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

from batchinfer_kernels.arithmetic import CacheDtype

_N = TypeVar("_N", int, Any)  # an integer or an array of integers
PACKED_TOGETHER = 128  # inputs that are packed together: SPAN of batchinfer_kernels.quantized_matmul


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peak rates of a device.

    Attributes:
        flops_per_s: operations per second in the dtype of the run.
        bytes_per_s: memory bandwidth.
        coded_ops_per_s: operations per second on quantised int8 or fp8 values; None: as `flops_per_s`.
    """

    flops_per_s: float
    bytes_per_s: float
    coded_ops_per_s: float | None = None

    @property
    def fastest(self) -> float:
        """Return the higher of the peak rates of `flops_per_s` and `coded_ops_per_s`, in operations per second."""
        return max(self.flops_per_s, self.coded_ops_per_s or 0.0)

    def part(self, parts: int) -> Peaks:
        """Return the peaks of one of `parts` equal parts of the device."""
        integer = None if self.coded_ops_per_s is None else self.coded_ops_per_s / parts
        return Peaks(self.flops_per_s / parts, self.bytes_per_s / parts, integer)

    def times(self, devices: int) -> Peaks:
        """Return the total peaks of `devices` devices like this one."""
        integer = None if self.coded_ops_per_s is None else self.coded_ops_per_s * devices
        return Peaks(self.flops_per_s * devices, self.bytes_per_s * devices, integer)


@dataclass(frozen=True, slots=True)
class Cost:
    """The operations and bytes of one operator call, or of several calls.

    Attributes:
        flops: all operations, integer operations included; a multiply-add counts as two.
        bytes: bytes read and written; each operand counts once.
        coded_ops: the part of `flops` that multiplies and adds quantised 8-bit values.
    """

    flops: int = 0
    bytes: int = 0
    coded_ops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.coded_ops + other.coded_ops)

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times, self.coded_ops * times)

    def seconds(self, peaks: Peaks) -> float:
        """Return the roofline time of this cost: the larger of compute time and memory time, in seconds.

        Quantised and floating-point operations share execution units, so their times add up.
        """
        integer = self.coded_ops / (peaks.coded_ops_per_s or peaks.flops_per_s)
        computing = (self.flops - self.coded_ops) / peaks.flops_per_s + integer
        return max(computing, self.bytes / peaks.bytes_per_s)


def embedding_cost(tokens: int, hidden: int, itemsize: int) -> Cost:
    """Return the cost of looking up tokens in the embedding table.

    Args:
        tokens: number of tokens.
        hidden: number of values of a row of the table, which is copied for each token.
        itemsize: bytes per value.
    """
    return Cost(0, 2 * tokens * hidden * itemsize)


def linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int, weight_itemsize: int) -> Cost:
    """Return the cost of y = x W^T for `tokens` rows of x.

    Args:
        tokens: number of rows of x.
        inputs: number of inputs of the weight.
        outputs: number of outputs of the weight.
        itemsize: bytes per activation value.
        weight_itemsize: bytes per weight; each is read once for all rows.
    """
    moved = itemsize * tokens * (inputs + outputs) + weight_itemsize * inputs * outputs
    return Cost(2 * tokens * inputs * outputs, moved)


def sparse_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int) -> Cost:
    """Return the cost of a linear layer whose weight is 2:4 sparse: half of the values are neither read nor multiplied.

    Each stored value has two bits for its position.

    Args:
        tokens: number of rows of x.
        inputs: number of inputs of the weight.
        outputs: number of outputs of the weight.
        itemsize: bytes per activation value, and per weight.
    """
    kept = inputs * outputs // 2
    moved = itemsize * (tokens * (inputs + outputs) + kept) + -(-kept // 4)
    return Cost(2 * tokens * kept, moved)


def quantized_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int) -> Cost:
    """Return the cost of a linear layer with an int8 weight and activations that are quantised to int8 per row.

    Quantising takes 3 operations per value and 2 per row, scaling takes 2 per output value. The quantised activations
    are assumed to stay in the processor's cache and cost no bytes.

    Args:
        tokens: number of rows of x.
        inputs: number of inputs of the weight.
        outputs: number of outputs of the weight; each has a float32 scale.
        itemsize: bytes per activation value before quantisation.
    """
    products = 2 * tokens * inputs * outputs
    moved = itemsize * tokens * (inputs + outputs) + inputs * outputs + 4 * outputs
    return Cost(products + tokens * (3 * inputs + 2 * outputs + 2), moved, products)


def int4_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int, group: int) -> Cost:
    """Return the cost of a linear layer with an int4 weight and activations that are quantised to int8 per row.

    This is the cost of `quantized_linear_cost`, plus a multiplication and an addition for each group of inputs.

    Args:
        tokens: number of rows of x.
        inputs: number of inputs of the weight.
        outputs: number of outputs of the weight.
        itemsize: bytes per activation value before quantisation.
        group: number of inputs of an output that share a float32 scale.
    """
    groups = -(-inputs // group)
    cost = quantized_linear_cost(tokens, inputs, outputs, itemsize)
    saved = inputs * outputs - -(-inputs // 2) * outputs + 4 * outputs * (1 - groups)
    return Cost(cost.flops + 2 * tokens * groups * outputs, cost.bytes - saved, cost.coded_ops)


def fp8_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int) -> Cost:
    """Return the cost of a linear layer with a float8_e4m3fn weight and activations quantised to float8 per row.

    This is the cost of `quantized_linear_cost`, plus a clamp per value. No operation counts as `Cost.coded_ops`, so
    `Peaks.flops_per_s` must be the peak of fp8.

    Args:
        tokens: number of rows of x.
        inputs: number of inputs of the weight.
        outputs: number of outputs of the weight.
        itemsize: bytes per activation value before quantisation.
    """
    cost = quantized_linear_cost(tokens, inputs, outputs, itemsize)
    return Cost(cost.flops + tokens * inputs, cost.bytes)


def block_fp8_linear_cost(
    tokens: int, inputs: int, outputs: int, itemsize: int, block: tuple[int, int] = (128, 128)
) -> Cost:
    """Return the cost of a linear layer with a float8_e4m3fn weight that has one scale per block.

    Activations are quantised per row and group of inputs (2 divisions per group). The product of a group is scaled and
    added (3 operations per output value).

    Args:
        tokens: number of rows of x.
        inputs: number of inputs of the weight.
        outputs: number of outputs of the weight.
        itemsize: bytes per activation value before quantisation.
        block: numbers of outputs and inputs that share a scale.
    """
    groups, blocks = -(-inputs // block[1]), -(-outputs // block[0])
    products = 2 * tokens * inputs * outputs
    moved = itemsize * tokens * (inputs + outputs) + inputs * outputs + 4 * groups * blocks
    return Cost(products + tokens * (4 * inputs + groups * (3 * outputs + 2)), moved, products)


def grouped_linear_cost(
    rows: int,
    hit: int,
    inputs: int,
    outputs: int,
    itemsize: int,
    weight_itemsize: int,
    tokens: int | None = None,
) -> Cost:
    """Return the cost of a linear layer in which each row uses the weight of one expert.

    Args:
        rows: number of rows of the product: tokens × experts per token.
        hit: number of experts that have rows; only their weights are read.
        inputs: number of inputs of a weight.
        outputs: number of outputs of a weight.
        itemsize: bytes per activation value.
        weight_itemsize: bytes per weight.
        tokens: number of distinct rows of x, which are read once. `rows` by default.
    """
    moved = itemsize * ((rows if tokens is None else tokens) * inputs + rows * outputs)
    return Cost(2 * rows * inputs * outputs, moved + weight_itemsize * hit * inputs * outputs)


def quantized_grouped_linear_cost(
    rows: int, hit: int, inputs: int, outputs: int, itemsize: int, tokens: int | None = None
) -> Cost:
    """Return the cost of a linear layer in which each row uses the int8 weight of one expert.

    Args:
        rows: number of rows of the product; each is quantised to int8.
        hit: number of experts that have rows; only their weights are read.
        inputs: number of inputs of a weight.
        outputs: number of outputs of a weight.
        itemsize: bytes per activation value before quantisation.
        tokens: number of distinct rows of x, `rows` by default.
    """
    plain = grouped_linear_cost(rows, hit, inputs, outputs, itemsize, 1, tokens)
    return Cost(
        plain.flops + rows * (3 * inputs + 2 * outputs + 2), plain.bytes + 4 * hit * outputs, plain.flops
    )


def int4_grouped_linear_cost(
    rows: int,
    hit: int,
    inputs: int,
    outputs: int,
    itemsize: int,
    group: int,
    tokens: int | None = None,
    *,
    coded: bool = True,
) -> Cost:
    """Return the cost of `grouped_linear_cost` for int4 weights that have a scale per output and group of inputs.

    Args:
        rows: number of rows of the product.
        hit: number of experts that have rows.
        inputs: number of inputs of a weight.
        outputs: number of outputs of a weight.
        itemsize: bytes per activation value.
        group: number of inputs that share a scale.
        tokens: number of distinct rows of x, `rows` by default.
        coded: True if rows are quantised to int8, as in `int4_linear_cost`. False if weights are converted to the dtype
            of the activations instead; the conversion is not counted.
    """
    groups = -(-inputs // group)
    plain = grouped_linear_cost(rows, hit, inputs, outputs, itemsize, 0, tokens)
    read = Cost(0, hit * outputs * (-(-inputs // 2) + 4 * groups))
    if not coded:
        return plain + read
    one = int4_linear_cost(rows, inputs, outputs, itemsize, group)
    return Cost(one.flops, plain.bytes + read.bytes, one.coded_ops)


def mxfp4_grouped_linear_cost(
    rows: int, hit: int, inputs: int, outputs: int, itemsize: int, tokens: int | None = None
) -> Cost:
    """Return the cost of a linear layer in which each row uses the MXFP4 weight of one expert.

    The weights take half a byte per value and one byte per 32 values. Their conversion to the dtype of the activations
    is not counted.

    Args:
        rows: number of rows of the product.
        hit: number of experts that have rows; only their weights are read.
        inputs: number of inputs of a weight.
        outputs: number of outputs of a weight.
        itemsize: bytes per activation value.
        tokens: number of distinct rows of x, `rows` by default.
    """
    plain = grouped_linear_cost(rows, hit, inputs, outputs, itemsize, 0, tokens)
    return plain + Cost(0, hit * outputs * (inputs // 2 + inputs // 32))


def mxfp4_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int) -> Cost:
    """Return the cost of a linear layer with an MXFP4 weight: half a byte per value, and one byte per 32 values.

    The conversion of the values to the dtype of the activations is not counted.

    Args:
        tokens: number of rows of x.
        inputs: number of inputs of the weight.
        outputs: number of outputs of the weight.
        itemsize: bytes per activation value.
    """
    return linear_cost(tokens, inputs, outputs, itemsize, 0) + Cost(0, outputs * (inputs // 2 + inputs // 32))


def block_fp8_grouped_linear_cost(
    rows: int,
    hit: int,
    inputs: int,
    outputs: int,
    itemsize: int,
    tokens: int | None = None,
    block: tuple[int, int] = (128, 128),
) -> Cost:
    """Return the cost of `grouped_linear_cost` for float8_e4m3fn weights with one scale per block.

    Args:
        rows: number of rows of the product; each is quantised per group of inputs.
        hit: number of experts that have rows.
        inputs: number of inputs of a weight.
        outputs: number of outputs of a weight.
        itemsize: bytes per activation value before quantisation.
        tokens: number of distinct rows of x, `rows` by default.
        block: numbers of outputs and inputs that share a scale.
    """
    plain = grouped_linear_cost(rows, hit, inputs, outputs, itemsize, 1, tokens)
    one = block_fp8_linear_cost(rows, inputs, outputs, itemsize, block)
    scales = 4 * hit * -(-inputs // block[1]) * -(-outputs // block[0])
    return Cost(one.flops, plain.bytes + scales, plain.flops)


def expected_hit(tokens: int, experts: int, chosen: int) -> int:
    """Return the expected number of distinct experts that a step uses, rounded, if all experts are equally likely.

    Args:
        tokens: number of tokens of the step.
        experts: number of experts of the layer.
        chosen: number of experts per token.
    """
    return round(experts * (1 - (1 - chosen / experts) ** tokens))


def routing_cost(tokens: int, experts: int, chosen: int) -> Cost:
    """Return the cost of choosing experts: a softmax of float32 logits, and writing the chosen experts.

    A chosen expert is written as a float32 weight and an 8-byte number. Finding the greatest logits is not counted.

    Args:
        tokens: number of tokens of the step.
        experts: number of experts of the layer.
        chosen: number of experts that are chosen per token.
    """
    return Cost(4 * tokens * experts, tokens * (4 * experts + 12 * chosen))


def combine_cost(tokens: int, chosen: int, hidden: int, itemsize: int) -> Cost:
    """Return the cost of the weighted sum of the results of each token's experts.

    Args:
        tokens: number of tokens of the step.
        chosen: number of experts per token; each result is read once, with its weight and index.
        hidden: number of values of a result and of a sum.
        itemsize: bytes per value.
    """
    values = tokens * hidden
    moved = (chosen + 1) * values * itemsize + 12 * tokens * chosen
    return Cost((2 * chosen - 1) * values, moved)


def weight_only_linear_cost(
    tokens: int,
    inputs: int,
    outputs: int,
    itemsize: int,
    *,
    group: int | None = None,
    zeros: bool = False,
    scale_bytes: int | None = None,
) -> Cost:
    """Return the cost of y = x W^T with a packed quantised weight and activations that are not quantised.

    Args:
        tokens: number of rows of x.
        inputs: number of inputs of the weight, padded in memory to a multiple of PACKED_TOGETHER.
        outputs: number of outputs of the weight.
        itemsize: bytes per activation value.
        group: number of inputs that share a scale in an int4 weight. None: the weight is int8 with a float32 scale per
            output.
        zeros: True if each group also has a zero point of one byte.
        scale_bytes: bytes per group's scale, `itemsize` by default.
    """
    products, values = 2 * tokens * inputs * outputs, inputs * outputs
    packed = -(-inputs // PACKED_TOGETHER) * PACKED_TOGETHER * outputs
    moved = itemsize * tokens * (inputs + outputs)
    if group is None:
        return Cost(products + tokens * outputs, moved + packed + 4 * outputs)
    grouped = -(-inputs // group) * outputs * ((scale_bytes or itemsize) + zeros)
    return Cost(products + (2 + zeros) * values, moved + packed // 2 + grouped)


# Share of the peak that a product with many rows reaches if it widens its weight in registers. From published numbers
# (Frantar et al., 2024, "Marlin", compared with cuBLAS); not measured here
REGISTERS_SHARE = 0.5
# Buffer for widened values of a weight. Small enough that most of it stays in the L2 cache of large GPUs (at least
# 50 MiB since H100), and large enough for thousands of outputs. Not measured
PANEL_BYTES = 64 << 20
MAX_PANEL_ROWS = 1 << 20  # exceeds the rows of any step


def widening_cost(
    inputs: int,
    outputs: int,
    itemsize: int,
    *,
    group: int,
    zeros: bool = False,
    scale_bytes: int | None = None,
) -> Cost:
    """Return the cost of dequantising a 4-bit weight into a buffer: reading it, and writing its values.

    Args:
        inputs: number of inputs of the weight.
        outputs: number of outputs of the weight.
        itemsize: bytes per dequantised value.
        group: number of inputs that share a scale.
        zeros: True if each group also has a zero point of one byte.
        scale_bytes: bytes per group's scale, `itemsize` by default.
    """
    read = weight_only_linear_cost(
        0, inputs, outputs, itemsize, group=group, zeros=zeros, scale_bytes=scale_bytes
    )
    return read + Cost(0, itemsize * inputs * outputs)


def least_panel_rows(peaks: Peaks, inputs: int, outputs: int, itemsize: int, widened: Cost) -> int:
    """Return the smallest number of rows of x with which a 4-bit weight should be dequantised into a buffer.

    With fewer rows it is faster to dequantise in registers during the product, although such a product reaches only
    REGISTERS_SHARE of the peak. The result is at most MAX_PANEL_ROWS.

    Args:
        peaks: peak rates of the device.
        inputs: number of inputs of the weight.
        outputs: number of outputs of the weight.
        itemsize: bytes per activation value.
        widened: cost of dequantising the weight, from `widening_cost`; only its bytes count.
    """
    weight_bytes = widened.bytes - itemsize * inputs * outputs

    def pays(rows: int) -> bool:
        slow = Peaks(peaks.flops_per_s * REGISTERS_SHARE, peaks.bytes_per_s)
        multiplied = linear_cost(rows, inputs, outputs, itemsize, itemsize)
        apart = widened.bytes / peaks.bytes_per_s
        read = weight_bytes + itemsize * rows * (inputs + outputs)
        return apart + multiplied.seconds(peaks) < Cost(multiplied.flops, read).seconds(slow)

    return bisect_left(range(MAX_PANEL_ROWS), True, key=pays)


def rms_norm_cost(tokens: int, hidden: int, itemsize: int, residual: bool) -> Cost:
    """Return the cost of an RMSNorm: 4 operations per value and 2 per row.

    Args:
        tokens: number of rows.
        hidden: number of values of a row.
        itemsize: bytes per value.
        residual: True if a residual is added first. It takes an operation per value, and is read and written too.
    """
    values = tokens * hidden
    moved = (4 if residual else 2) * values * itemsize + hidden * itemsize
    return Cost((5 if residual else 4) * values + 2 * tokens, moved)


def layer_norm_cost(tokens: int, hidden: int, itemsize: int, residual: bool, biased: bool = True) -> Cost:
    """Return the cost of a LayerNorm: 6 operations per value and 2 per row.

    Args:
        tokens: number of rows.
        hidden: number of values of a row.
        itemsize: bytes per value.
        residual: True if a residual is added first. It takes an operation per value, and is read and written too.
        biased: True if the norm has a bias, which takes an operation per value.
    """
    values = tokens * hidden
    moved = (4 if residual else 2) * values * itemsize + (1 + biased) * hidden * itemsize
    return Cost((6 + biased + residual) * values + 2 * tokens, moved)


def rope_store_cost(
    tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    *,
    rotary_dim: int | None = None,
    codes: CacheDtype | None = None,
    normed: bool = False,
) -> Cost:
    """Return the cost of rotating q and k by their positions (RoPE), and storing k and v in the KV cache.

    Args:
        tokens: number of tokens of the step.
        q_heads: number of query heads.
        kv_heads: number of KV heads. 0: the layer reads the K and V of another layer, and only q is rotated.
        head_dim: number of values of a head.
        itemsize: bytes per value.
        rotary_dim: number of rotated values of a head, all by default; each takes 3 operations.
        codes: format of a quantised cache: one byte per value and a float32 scale per token and head. None: not
            quantised.
        normed: True if q and k pass an RMSNorm first.
    """
    turned, heads = head_dim if rotary_dim is None else rotary_dim, tokens * (q_heads + kv_heads)
    flops, values = 3 * heads * turned, tokens * kv_heads * head_dim
    slot = 8 if kv_heads else 0
    moved = 2 * heads * head_dim * itemsize + 2 * values * itemsize + tokens * (4 * turned + slot)
    if normed:
        flops += rms_norm_cost(heads, head_dim, itemsize, residual=False).flops
        moved += (2 if kv_heads else 1) * head_dim * itemsize
    if codes is not None:
        flops += 2 * ((4 if codes == "fp8" else 3) * values + 2 * tokens * kv_heads)
        moved += 2 * (values * (1 - itemsize) + 4 * tokens * kv_heads)
    return Cost(flops, moved)


def copy_parts_cost(
    tokens: int, kv_heads: int, head_dim: int, itemsize: int, tensors: int = 2, coded: bool = False
) -> Cost:
    """Return the cost of copying the K and V of cached tokens, within the cache of one layer.

    Args:
        tokens: number of cached tokens to copy.
        kv_heads: number of KV heads.
        head_dim: number of values of a head.
        itemsize: bytes per value.
        tensors: number of cache tensors: 2 for K and V, 1 if both are the same latents.
        coded: True if the cache holds one-byte quantised values with a scale per head.
    """
    head = head_dim + 4 if coded else head_dim * itemsize
    return Cost(0, 2 * tensors * tokens * kv_heads * head)


def attention_cost(
    tokens: int,
    pairs: int,
    kv_tokens: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    coded: bool = False,
) -> Cost:
    """Return the cost of scaled dot-product attention over a paged cache.

    Args:
        tokens: number of query tokens.
        pairs: number of attended (query, key) pairs, summed over sequences.
        kv_tokens: number of distinct cached tokens that are read; a block that sequences share counts once.
        q_heads: number of query heads.
        kv_heads: number of KV heads.
        head_dim: number of values of a head.
        itemsize: bytes per value.
        coded: True if the cache holds one-byte quantised values with a float32 scale per token and head.
    """
    cached = 2 * kv_tokens * kv_heads * (head_dim + 4 if coded else head_dim * itemsize)
    return Cost(4 * pairs * q_heads * head_dim, 2 * tokens * q_heads * head_dim * itemsize + cached)


def latent_attention_cost(
    tokens: int, pairs: int, kv_tokens: int, heads: int, width: int, rank: int, itemsize: int
) -> Cost:
    """Return the cost of attention over a cache of latents, in which the same values serve as K and V.

    Args:
        tokens: number of query tokens.
        pairs: number of attended (query, key) pairs, summed over sequences.
        kv_tokens: number of distinct cached tokens that are read.
        heads: number of query heads.
        width: number of values of a latent. All of them form the key.
        rank: number of values of a latent that form the value.
        itemsize: bytes per value.
    """
    moved = tokens * heads * (width + rank) + kv_tokens * width
    return Cost(2 * pairs * heads * (width + rank), itemsize * moved)


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The numbers of values per head in multi-head latent attention (MLA).

    Attributes:
        rank: number of values of the latent, from which K and V of all heads are computed.
        plain: number of values of a query and key that are not rotated.
        turned: number of rotated values of a query and key. All heads share the rotated values of a key.
        value: number of values of V.
    """

    rank: int
    plain: int
    turned: int
    value: int

    @property
    def saved(self) -> int:
        """Return the FLOPs by which attention over latents exceeds attention over K and V, per pair and head."""
        return 2 * (2 * self.rank + self.turned) - self.pair

    @property
    def pair(self) -> int:
        """Return the FLOPs of attention over computed K and V, per (query, key) pair and head."""
        return 2 * (self.plain + self.turned + self.value)

    @property
    def made(self) -> int:
        """Return the FLOPs of computing K and V of one cached token from its latent, for one head.

        Attention over latents takes equally many FLOPs per query, to project the query to the latent space and its
        result back.
        """
        return 2 * self.rank * (self.plain + self.value)

    def is_decompressing_cheaper(self, queries: _N, contexts: _N) -> Any:
        """Return True where computing K and V from the latents takes fewer FLOPs than attention over the latents.

        Args:
            queries: number of new tokens of a sequence; an integer, or an array with one value per sequence.
            contexts: number of all tokens of the sequence, new ones included; as `queries`.

        Returns:
            A bool, or an array with one bool per sequence.
        """
        earlier = contexts - queries
        pairs = queries * earlier + queries * (queries + 1) // 2
        # New tokens need no count: computing their K and V replaces the projections of their queries, for the same cost
        return pairs * self.saved > earlier * self.made


def decompressed_attention_cost(
    tokens: int, pairs: int, kv_tokens: int, heads: int, sizes: LatentSizes, itemsize: int
) -> Cost:
    """Return the cost of attention over K and V of each head that have been computed from latents.

    Args:
        tokens: number of query tokens.
        pairs: number of attended (query, key) pairs, summed over sequences.
        kv_tokens: number of keys that are read.
        heads: number of query heads; they share the rotated values of a key.
        sizes: numbers of values per head.
        itemsize: bytes per value.
    """
    moved = tokens * heads * (sizes.plain + sizes.turned + sizes.value)
    moved += kv_tokens * (heads * (sizes.plain + sizes.value) + sizes.turned)
    return Cost(pairs * heads * sizes.pair, itemsize * moved)


def latent_store_cost(tokens: int, heads: int, rank: int, rotary_dim: int, itemsize: int) -> Cost:
    """Return the cost of rotating q and k (RoPE), and storing k and the latent in the cache. All heads share one k.

    Args:
        tokens: number of tokens of the step.
        heads: number of query heads.
        rank: number of values of a latent.
        rotary_dim: number of rotated values of a head; each takes 3 operations.
        itemsize: bytes per value.
    """
    turned = (heads + 1) * rotary_dim
    return Cost(3 * tokens * turned, tokens * (2 * itemsize * (turned + rank) + 4 * rotary_dim + 8))


def merge_state_cost(parts: int, tokens: int, heads: int, head_dim: int, itemsize: int) -> Cost:
    """Return the cost of merging partial attention results by their log-sum-exps: 2 operations per value.

    Args:
        parts: number of partial results per query.
        tokens: number of query tokens.
        heads: number of query heads.
        head_dim: number of values of a head.
        itemsize: bytes per value.
    """
    values, sums = tokens * heads * head_dim, 4 * tokens * heads
    return Cost(2 * parts * values, (parts + 1) * (values * itemsize + sums))


def gated_activation_cost(tokens: int, intermediate: int, itemsize: int) -> Cost:
    """Return the cost of act(gate) * up: 5 operations per output.

    Args:
        tokens: number of rows.
        intermediate: number of outputs of a row.
        itemsize: bytes per value.
    """
    return Cost(5 * tokens * intermediate, 3 * tokens * intermediate * itemsize)


def activation_cost(tokens: int, intermediate: int, itemsize: int) -> Cost:
    """Return the cost of an activation function: 4 operations per value.

    Args:
        tokens: number of rows.
        intermediate: number of values of a row.
        itemsize: bytes per value.
    """
    return Cost(4 * tokens * intermediate, 2 * tokens * intermediate * itemsize)


def scale_cost(tokens: int, width: int, itemsize: int) -> Cost:
    """Return the cost of multiplying all values of a matrix by one number.

    Args:
        tokens: number of rows.
        width: number of values of a row.
        itemsize: bytes per value.
    """
    return Cost(tokens * width, 2 * tokens * width * itemsize)


def low_rank_cost(tokens: int, adapters: int, inputs: int, outputs: int, rank: int, itemsize: int) -> Cost:
    """Return the cost of adding the product B A x of LoRA factors A and B to the float32 result of a linear layer.

    Args:
        tokens: number of tokens that have an adapter of this rank.
        adapters: number of distinct adapters of these tokens; the factors of each are read once.
        inputs: number of inputs of the layer.
        outputs: number of outputs of the layer.
        rank: rank of the adapters.
        itemsize: bytes per activation value.
    """
    width = inputs + outputs
    moved = (
        itemsize * tokens * (inputs + 2 * rank) + 12 * tokens * outputs + itemsize * adapters * rank * width
    )
    return Cost(tokens * (2 * rank * width + outputs), moved)


def cap_cost(rows: int, vocab: int) -> Cost:
    """Return the cost of capping float32 logits, cap × tanh(logit / cap): 3 operations per logit.

    Args:
        rows: number of rows of logits.
        vocab: number of logits of a row.
    """
    return Cost(3 * rows * vocab, 2 * rows * vocab * 4)


def sample_cost(rows: int, vocab: int, itemsize: int, drawn: int = 0) -> Cost:
    """Return the cost of sampling tokens: one comparison per logit, and 10 more operations in rows with a temperature.

    Sorting for top-k and top-p is not counted, because its cost depends on the probabilities.

    Args:
        rows: number of sampled rows.
        vocab: number of logits of a row.
        itemsize: bytes per logit.
        drawn: number of rows with a temperature above 0.
    """
    return Cost((rows + 10 * drawn) * vocab, rows * (vocab * itemsize + 8))


def penalise_cost(tokens: int, distinct: int, said: int, itemsize: int) -> Cost:
    """Return the cost of repetition, presence and frequency penalties.

    Args:
        tokens: number of tokens of all rows' prompts and answers, which are read to find the penalised ones.
        distinct: number of distinct tokens of prompts and answers, summed over rows: their logits are divided or
            multiplied.
        said: number of distinct tokens of the answers: presence and frequency penalties are subtracted from their
            logits.
        itemsize: bytes per logit.
    """
    return Cost(3 * distinct + 3 * said, 4 * tokens + 2 * distinct * itemsize)


def mask_cost(rows: int, vocab: int, masked: int, itemsize: int) -> Cost:
    """Return the cost of token masks: reading one bit per token and row, and writing the masked logits.

    Args:
        rows: number of rows with a mask.
        vocab: number of logits of a row.
        masked: number of masked logits of all rows together.
        itemsize: bytes per logit.
    """
    return Cost(0, rows * (-(-vocab // 32) * 4 + 4) + masked * itemsize)


def log_probabilities_cost(rows: int, vocab: int, most: int, itemsize: int) -> Cost:
    """Return the cost of a log-softmax, and of writing the log-probabilities of the chosen and the top tokens.

    Sorting is not counted.

    Args:
        rows: number of rows of logits.
        vocab: number of logits of a row.
        most: number of top tokens.
        itemsize: bytes per logit.
    """
    return Cost(5 * rows * vocab, rows * (vocab * itemsize + 8 + 4 + 12 * most))


@dataclass(frozen=True, slots=True)
class StepShape:
    """The amount of work of one engine step.

    Attributes:
        tokens: number of query tokens.
        sampled: number of rows whose logits are computed.
        pairs: number of attended (query, key) pairs, summed over layers.
        kv_tokens: number of distinct cached tokens that are read, summed over layers.
        copied: number of cached tokens that are copied to another block, in each layer with a KV cache.
        adapted: number of query tokens that have an adapter.
        adapters: number of distinct adapters of these tokens.
    """

    tokens: int
    sampled: int
    pairs: int
    kv_tokens: int
    copied: int = 0
    adapted: int = 0
    adapters: int = 0


@dataclass(frozen=True, slots=True)
class DecompressionFlops:
    """The FLOPs of attention over K and V that are first computed from cached latents (MLA).

    Attributes:
        pair: FLOPs per (query, key) pair, of all heads, averaged over layers.
        earlier: FLOPs of computing K and V of one token that an earlier step cached, in one layer.
        layers: number of layers.
    """

    pair: int
    earlier: int
    layers: int

    def flops(self, step: StepShape) -> int:
        """Return the FLOPs of attention in a step if all K and V are computed from latents.

        Args:
            step: the work of the step.
        """
        return self.pair * step.pairs + self.earlier * max(0, step.kv_tokens - self.layers * step.tokens)


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """The cost of an operator in a step, summed over all layers that have it.

    It is a fixed cost plus a cost for each count of a StepShape, such as a cost per token.

    Attributes:
        name: name of the operator.
        step: fixed cost of a step, such as reading weights.
        token: cost per query token.
        sampled: cost per row whose logits are computed.
        pair: cost per attended (query, key) pair.
        kv_token: cost per cached token that is read.
        copied: cost per cached token that is copied.
        expert: cost per distinct expert that has tokens.
        adapted: cost per query token that has an adapter.
        adapter: cost per distinct adapter.
        only_sampled: True if the operator runs only in steps that sample tokens.
        experts: number of experts of a layer; 0 for an operator without experts.
        chosen: number of experts per token.
        decompressing: for attention over latents, the FLOPs if K and V are computed from the latents instead; the
            smaller number counts. None: not attention over latents.
    """

    name: str
    step: Cost = Cost()
    token: Cost = Cost()
    sampled: Cost = Cost()
    pair: Cost = Cost()
    kv_token: Cost = Cost()
    copied: Cost = Cost()
    expert: Cost = Cost()
    adapted: Cost = Cost()
    adapter: Cost = Cost()
    only_sampled: bool = False
    experts: int = 0
    chosen: int = 0
    decompressing: DecompressionFlops | None = None

    @property
    def useful_pair(self) -> int:
        """Return the FLOPs of attention of one (query, key) pair, over latents or decompressed, whichever is fewer."""
        return (
            self.pair.flops if self.decompressing is None else min(self.pair.flops, self.decompressing.pair)
        )

    def __add__(self, other: OperatorCost) -> OperatorCost:
        """Return the summed costs of two operators, with the name of `self`.

        Other attributes, such as `experts`, are taken from `other`.
        """
        parts = [getattr(self, part) + getattr(other, part) for part in _PARTS]
        return replace(other, name=self.name, **dict(zip(_PARTS, parts, strict=True)))

    def __mul__(self, times: int) -> OperatorCost:
        return replace(self, **{part: getattr(self, part) * times for part in _PARTS})

    def of(self, step: StepShape) -> Cost:
        """Return the cost of the operator in one step; zero if the operator does not run in the step."""
        if not step.tokens or (self.only_sampled and not step.sampled):
            return Cost()
        hit = expected_hit(step.tokens, self.experts, self.chosen) if self.experts else 0
        counts = (
            1, step.tokens, step.sampled, step.pairs, step.kv_tokens, step.copied, hit, step.adapted, step.adapters,
        )  # fmt: skip
        parts = (
            self.step, self.token, self.sampled, self.pair, self.kv_token, self.copied, self.expert, self.adapted,
            self.adapter,
        )  # fmt: skip
        flops = moved = coded = 0
        # A loop rather than sums of Cost objects: a simulation calls this for every step of a run
        for count, cost in zip(counts, parts, strict=True):
            flops += count * cost.flops
            moved += count * cost.bytes
            coded += count * cost.coded_ops
        if self.decompressing is not None:
            # An upper bound: the engine decides for each sequence whether it decompresses latents
            flops = min(flops, self.decompressing.flops(step))
        return Cost(flops, moved, coded)


_PARTS = ("step", "token", "sampled", "pair", "kv_token", "copied", "expert", "adapted", "adapter")

OperatorKind = Literal["linear", "attention", "sampling", "elementwise"]
OPERATOR_KINDS: tuple[OperatorKind, ...] = get_args(OperatorKind)
# Operations per byte of a token: a matrix product has hundreds, any other operator at most three
PRODUCT_INTENSITY = 8


def operator_kind(operator: OperatorCost) -> OperatorKind:
    """Return the kind of an operator: "attention", "sampling", "linear" or "elementwise".

    "sampling" includes the output head, because only sampled rows need it. An operator is "linear" if it has experts,
    or takes more than PRODUCT_INTENSITY operations per byte that it moves for a token.
    """
    if operator.pair.flops:
        return "attention"
    if operator.only_sampled:
        return "sampling"
    if operator.experts or operator.token.flops > PRODUCT_INTENSITY * operator.token.bytes:
        return "linear"
    return "elementwise"


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The costs of a model's operators, with sizes that forecasts need.

    Attributes:
        operators: the operators, each summed over its layers.
        windows: sliding window of each layer with attention; None: full attention.
        parameters: number of weights of linear layers, without the output head.
        active_parameters: the part of `parameters` that one token uses, without the experts it does not use.
        head_parameters: number of weights of the output head.
        caches: for each layer with a KV cache, its sliding window (None: full attention) and the bytes of a cached
            token.
        itemsize: bytes per activation value.
        weight_itemsize: bytes of a linear weight, less than `itemsize` if quantised.
        causal: False if queries also see later keys, up to the window on each side.
        adapted: True if tokens can have adapters.
    """

    operators: tuple[OperatorCost, ...]
    windows: tuple[int | None, ...]
    parameters: int
    active_parameters: int
    head_parameters: int
    caches: tuple[tuple[int | None, int], ...]
    itemsize: int
    weight_itemsize: float
    causal: bool = True
    adapted: bool = False

    @property
    def layers(self) -> int:
        """Return the number of layers with attention."""
        return len(self.windows)

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of K and V that a sequence keeps in the cache, summed over layers.

        Args:
            tokens: number of tokens of the sequence.
        """
        return sum(size * (tokens if window is None else min(tokens, window)) for window, size in self.caches)

    def seen(self, tokens: int) -> int:
        """Return the number of keys that a query attends to, its own key included, summed over layers.

        Args:
            tokens: number of tokens of the sequence; the query is the last token.
        """
        return sum(tokens if window is None else min(tokens, window) for window in self.windows)

    def pairs(self, tokens: int) -> int:
        """Return the number of (query, key) pairs of attention in a prefill, summed over layers.

        Args:
            tokens: number of tokens of the prompt.
        """
        total = 0
        for window in self.windows:
            growing = tokens if window is None else min(tokens, window)
            total += growing * (growing + 1) // 2 + (tokens - growing) * growing
        return total if self.causal else 2 * total - tokens * self.layers

    @property
    def quantized(self) -> bool:
        """Return True if the linear layers have quantised weights."""
        return self.weight_itemsize < self.itemsize

    def step(self, step: StepShape) -> dict[str, Cost]:
        """Return the cost of each operator in one step, by name. An operator that does not run costs 0."""
        return {operator.name: operator.of(step) for operator in self.operators}

    def another_step(self) -> dict[str, Cost]:
        """Return the cost of computing the same tokens in one step more: the additional cost per operator, by name.

        The additional step reads all weights again, but only the experts of one token.
        """
        return {
            operator.name: operator.step + operator.expert * operator.chosen for operator in self.operators
        }

    def model_flops(self, step: StepShape) -> int:
        """Return the useful FLOPs of a step, as MFU counts them.

        They are 2 × active parameters × tokens, plus 2 × parameters of the output head × sampled rows, plus
        `pair_flops` × (query, key) pairs.
        """
        dense = self.active_parameters * step.tokens + self.head_parameters * step.sampled
        return 2 * dense + self.pair_flops * step.pairs

    @property
    def pair_flops(self) -> int:
        """Return the useful FLOPs of attention of one (query, key) pair, summed over operators."""
        return sum(operator.useful_pair for operator in self.operators)


def step_total(costs: dict[str, Cost]) -> Cost:
    """Return the total cost of a step from the costs of its operators, by name."""
    return sum(costs.values(), Cost())


def roofline_seconds(costs: dict[str, Cost], peaks: Peaks) -> float:
    """Return the roofline time of a step in seconds: the sum of its operators' roofline times.

    Args:
        costs: the cost of each operator, by name.
        peaks: peak rates of the device.
    """
    return sum(cost.seconds(peaks) for cost in costs.values())
