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
    """Peak rates of the hardware: FLOP/s in the dtype of the run, and bytes/s."""

    flops_per_s: float
    bytes_per_s: float
    coded_ops_per_s: float | None = None  # of quantised linear layers in int8 or fp8; None: flops_per_s

    @property
    def fastest(self) -> float:
        """Return the highest peak rate, in operations per second."""
        return max(self.flops_per_s, self.coded_ops_per_s or 0.0)

    def part(self, parts: int) -> Peaks:
        """Return the peaks of one of `parts` equal parts of the hardware."""
        integer = None if self.coded_ops_per_s is None else self.coded_ops_per_s / parts
        return Peaks(self.flops_per_s / parts, self.bytes_per_s / parts, integer)

    def times(self, devices: int) -> Peaks:
        """Return the total peaks of `devices` devices like this one."""
        integer = None if self.coded_ops_per_s is None else self.coded_ops_per_s * devices
        return Peaks(self.flops_per_s * devices, self.bytes_per_s * devices, integer)


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs and bytes of one operator call, or of a sequence of calls."""

    flops: int = 0  # all operations, including integer operations
    bytes: int = 0
    coded_ops: int = 0  # the part of `flops` that multiplies and adds quantised 8-bit values

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.coded_ops + other.coded_ops)

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times, self.coded_ops * times)

    def seconds(self, peaks: Peaks) -> float:
        """Return the minimum time of this cost on hardware with these peaks.

        Quantised and floating-point operations share execution units, so their times add up.
        """
        integer = self.coded_ops / (peaks.coded_ops_per_s or peaks.flops_per_s)
        computing = (self.flops - self.coded_ops) / peaks.flops_per_s + integer
        return max(computing, self.bytes / peaks.bytes_per_s)


def embedding_cost(tokens: int, hidden: int, itemsize: int) -> Cost:
    """Return the cost of reading and writing one row of the embedding table per token."""
    return Cost(0, 2 * tokens * hidden * itemsize)


def linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int, weight_itemsize: int) -> Cost:
    """Return the cost of y = x W^T; the weight is read once for all tokens."""
    moved = itemsize * tokens * (inputs + outputs) + weight_itemsize * inputs * outputs
    return Cost(2 * tokens * inputs * outputs, moved)


def sparse_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int) -> Cost:
    """Return the cost of a linear layer whose weight is 2:4 sparse.

    Two of each four inputs are zero and are neither read nor multiplied. Each stored value has two bits for its
    position.
    """
    kept = inputs * outputs // 2
    moved = itemsize * (tokens * (inputs + outputs) + kept) + -(-kept // 4)
    return Cost(2 * tokens * kept, moved)


def quantized_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int) -> Cost:
    """Return the cost of a linear layer with an int8 weight and activations that are quantised per token.

    Quantising takes 3 operations per value (compare, multiply, round) and 2 divisions per token, scaling 2 per sum. The
    quantised activations are assumed to stay in the cache and cost no bytes.
    """
    products = 2 * tokens * inputs * outputs
    moved = itemsize * tokens * (inputs + outputs) + inputs * outputs + 4 * outputs
    return Cost(products + tokens * (3 * inputs + 2 * outputs + 2), moved, products)


def int4_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int, group: int) -> Cost:
    """Return the cost of a linear layer with an int4 weight and int8 activations.

    The cost is that of `quantized_linear_cost`, plus a multiplication and an addition for the sum of each group of
    inputs.
    """
    groups = -(-inputs // group)
    cost = quantized_linear_cost(tokens, inputs, outputs, itemsize)
    saved = inputs * outputs - -(-inputs // 2) * outputs + 4 * outputs * (1 - groups)
    return Cost(cost.flops + 2 * tokens * groups * outputs, cost.bytes - saved, cost.coded_ops)


def fp8_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int) -> Cost:
    """Return the cost of a linear layer with a float8_e4m3fn weight and activations that are quantised per token.

    The cost is that of `quantized_linear_cost`, plus a clamp per value. The operations count as `flops`, so the caller
    must pass the peak of fp8 as `flops_per_s`.
    """
    cost = quantized_linear_cost(tokens, inputs, outputs, itemsize)
    return Cost(cost.flops + tokens * inputs, cost.bytes)


def block_fp8_linear_cost(
    tokens: int, inputs: int, outputs: int, itemsize: int, block: tuple[int, int] = (128, 128)
) -> Cost:
    """Return the cost of a linear layer with a float8_e4m3fn weight that has one scale per block.

    A token has a scale for each group of inputs (2 divisions). The sum of a group is multiplied by the product of two
    scales and added (3 operations).

    Args:
        tokens: rows of x.
        inputs: inputs of the weight.
        outputs: outputs of the weight.
        itemsize: bytes of an activation.
        block: (outputs, inputs) that share a scale.
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
    """Return the cost of a linear layer with a weight per expert.

    Args:
        rows: rows of the product; each is multiplied by the weight of one expert.
        hit: experts that have rows; only their weights are read.
        inputs: inputs of the weight.
        outputs: outputs of the weight.
        itemsize: bytes of an activation.
        weight_itemsize: bytes of a weight.
        tokens: number of distinct rows of x, `rows` by default.
    """
    moved = itemsize * ((rows if tokens is None else tokens) * inputs + rows * outputs)
    return Cost(2 * rows * inputs * outputs, moved + weight_itemsize * hit * inputs * outputs)


def quantized_grouped_linear_cost(
    rows: int, hit: int, inputs: int, outputs: int, itemsize: int, tokens: int | None = None
) -> Cost:
    """Return the cost of `grouped_linear_cost` with int8 weights and rows that are quantised to int8."""
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
    """Return the cost of `grouped_linear_cost` with int4 weights that have a scale per output and group of inputs.

    Args:
        rows: rows of the product.
        hit: experts that have rows.
        inputs: inputs of the weight.
        outputs: outputs of the weight.
        itemsize: bytes of an activation.
        group: inputs that share a scale.
        tokens: number of distinct rows of x, `rows` by default.
        coded: True if rows are quantised to int8, as in `int4_linear_cost`. False if weights are widened; the cost of
            widening is not counted, because it depends on the tiles.
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
    """Return the cost of `grouped_linear_cost` with MXFP4 weights.

    A value takes half a byte, and 32 values share an exponent of one byte. Widening is not counted, because it depends
    on the tiles.
    """
    plain = grouped_linear_cost(rows, hit, inputs, outputs, itemsize, 0, tokens)
    return plain + Cost(0, hit * outputs * (inputs // 2 + inputs // 32))


def mxfp4_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int) -> Cost:
    """Return the cost of a linear layer with an MXFP4 weight that is widened and multiplied in the activations' dtype.

    Bytes are counted as in mxfp4_grouped_linear_cost; widening is not counted.
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
    """Return the cost of `grouped_linear_cost` with float8_e4m3fn weights that have one scale per block.

    Each row is quantised.
    """
    plain = grouped_linear_cost(rows, hit, inputs, outputs, itemsize, 1, tokens)
    one = block_fp8_linear_cost(rows, inputs, outputs, itemsize, block)
    scales = 4 * hit * -(-inputs // block[1]) * -(-outputs // block[0])
    return Cost(one.flops, plain.bytes + scales, plain.flops)


def expected_hit(tokens: int, experts: int, chosen: int) -> int:
    """Return the expected number of distinct experts of `tokens` tokens, rounded, if all experts are equally likely."""
    return round(experts * (1 - (1 - chosen / experts) ** tokens))


def routing_cost(tokens: int, experts: int, chosen: int) -> Cost:
    """Return the cost of choosing experts: a softmax of float32 logits (4 operations per logit).

    Writes a float32 weight and an 8-byte expert number per choice. The cost of top-k in torch is not counted.
    """
    return Cost(4 * tokens * experts, tokens * (4 * experts + 12 * chosen))


def combine_cost(tokens: int, chosen: int, hidden: int, itemsize: int) -> Cost:
    """Return the cost of weighting and adding the results of each token's experts.

    Each result is read once with its weight and index, and each sum is written once.
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
    """Return the cost of y = x W^T with a weight of packed quantised values and activations that are not quantised.

    Rows are padded to whole spans of PACKED_TOGETHER inputs.

    Args:
        tokens: rows of x.
        inputs: inputs of the weight.
        outputs: outputs of the weight.
        itemsize: bytes of an activation.
        group: None for int8, which has a float32 scale per output; else int4 with a scale per `group` inputs.
        zeros: True if each group also has a zero point of one byte.
        scale_bytes: bytes of a group's scale, `itemsize` by default.
    """
    products, values = 2 * tokens * inputs * outputs, inputs * outputs
    packed = -(-inputs // PACKED_TOGETHER) * PACKED_TOGETHER * outputs
    moved = itemsize * tokens * (inputs + outputs)
    if group is None:
        return Cost(products + tokens * outputs, moved + packed + 4 * outputs)
    grouped = -(-inputs // group) * outputs * ((scale_bytes or itemsize) + zeros)
    return Cost(products + (2 + zeros) * values, moved + packed // 2 + grouped)


# Share of the peak that a product with many rows reaches if it widens its weight in registers. From published figures
# (Frantar et al., 2024, "Marlin", compared with cuBLAS); not measured here
REGISTERS_SHARE = 0.5
# Buffer for widened values of a weight. Small enough that most of it stays in the L2 cache of large GPUs (at least
# 50 MiB since H100), and large enough for thousands of outputs. Not measured
PANEL_BYTES = 64 << 20
MOST_PANEL_ROWS = 1 << 20  # exceeds the rows of any step


def widening_cost(
    inputs: int,
    outputs: int,
    itemsize: int,
    *,
    group: int,
    zeros: bool = False,
    scale_bytes: int | None = None,
) -> Cost:
    """Return the cost of widening a 4-bit weight and writing its values; see weight_only_linear_cost."""
    read = weight_only_linear_cost(
        0, inputs, outputs, itemsize, group=group, zeros=zeros, scale_bytes=scale_bytes
    )
    return read + Cost(0, itemsize * inputs * outputs)


def least_panel_rows(peaks: Peaks, inputs: int, outputs: int, itemsize: int, widened: Cost) -> int:
    """Return the number of rows from which widening a 4-bit weight into a buffer first is faster.

    The alternative is to widen it in registers, which reaches REGISTERS_SHARE of the peak. The arithmetic of widening
    is not counted.

    Args:
        peaks: peak rates of the device.
        inputs: inputs of the weight.
        outputs: outputs of the weight.
        itemsize: bytes of an activation.
        widened: cost of widening the weight; see widening_cost.
    """
    weight_bytes = widened.bytes - itemsize * inputs * outputs

    def pays(rows: int) -> bool:
        slow = Peaks(peaks.flops_per_s * REGISTERS_SHARE, peaks.bytes_per_s)
        multiplied = linear_cost(rows, inputs, outputs, itemsize, itemsize)
        apart = widened.bytes / peaks.bytes_per_s
        read = weight_bytes + itemsize * rows * (inputs + outputs)
        return apart + multiplied.seconds(peaks) < Cost(multiplied.flops, read).seconds(slow)

    return bisect_left(range(MOST_PANEL_ROWS), True, key=pays)


def rms_norm_cost(tokens: int, hidden: int, itemsize: int, residual: bool) -> Cost:
    """Return the cost of an RMSNorm: 4 operations per value, 5 with a residual, and 2 per row for the root.

    x and the weight are read and y is written; a residual is read and written too.
    """
    values = tokens * hidden
    moved = (4 if residual else 2) * values * itemsize + hidden * itemsize
    return Cost((5 if residual else 4) * values + 2 * tokens, moved)


def layer_norm_cost(tokens: int, hidden: int, itemsize: int, residual: bool, biased: bool = True) -> Cost:
    """Return the cost of a LayerNorm: 6 operations per value, 1 more each for a bias and a residual, and 2 per row.

    Bytes are counted as for an RMSNorm, plus the bias.
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
    """Return the cost of rotating q and k (3 operations per rotated value) and storing q, k and v.

    cos and sin are read in float32.

    Args:
        tokens: tokens of the step.
        q_heads: query heads.
        kv_heads: 0 for a layer that reads the K and V of another layer: only q is rotated.
        head_dim: values of a head.
        itemsize: bytes of a value.
        rotary_dim: rotated values of a head, all by default.
        codes: format of a quantised cache: one byte per value and a float32 scale per token and head. A value takes a
            comparison, a multiplication and a rounding, for fp8 also a clamp; a token and head takes 2 divisions.
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
    """Return the cost of copying the K and V of `tokens` cached tokens.

    Args:
        tokens: cached tokens to copy.
        kv_heads: KV heads.
        head_dim: values of a head.
        itemsize: bytes of a value.
        tensors: 1 if K and V are the same latents.
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
        tokens: query tokens.
        pairs: attended (query, key) pairs, summed over sequences.
        kv_tokens: distinct cached tokens that are read; a block that sequences share counts once.
        q_heads: query heads.
        kv_heads: KV heads.
        head_dim: values of a head.
        itemsize: bytes of a value.
        coded: True if the cache holds one-byte quantised values with a float32 scale per token and head.
    """
    cached = 2 * kv_tokens * kv_heads * (head_dim + 4 if coded else head_dim * itemsize)
    return Cost(4 * pairs * q_heads * head_dim, 2 * tokens * q_heads * head_dim * itemsize + cached)


def latent_attention_cost(
    tokens: int, pairs: int, kv_tokens: int, heads: int, width: int, rank: int, itemsize: int
) -> Cost:
    """Return the cost of attention over a cache of latents, in which the same values serve as K and V.

    Args:
        tokens: query tokens.
        pairs: attended (query, key) pairs, summed over sequences.
        kv_tokens: distinct cached tokens that are read.
        heads: query heads.
        width: values of a token that each query is multiplied by.
        rank: values of a token that each probability is multiplied by.
        itemsize: bytes of a value.
    """
    moved = tokens * heads * (width + rank) + kv_tokens * width
    return Cost(2 * pairs * heads * (width + rank), itemsize * moved)


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The number of values per head in multi-head latent attention.

    Attributes:
        rank: the latent, from which K and V of all heads are computed.
        plain: the part of a query and key without position.
        turned: the rotated part of a query and key.
        value: V.
    """

    rank: int
    plain: int
    turned: int
    value: int

    @property
    def saved(self) -> int:
        """Return the FLOPs that a (query, key) pair of a head saves with K and V instead of the latent."""
        return 2 * (2 * self.rank + self.turned) - self.pair

    @property
    def pair(self) -> int:
        """Return the FLOPs of a (query, key) pair of a head with K and V."""
        return 2 * (self.plain + self.turned + self.value)

    @property
    def made(self) -> int:
        """Return the FLOPs of computing K and V of one key for one head.

        Projecting one query to the latent space and its result back takes the same number.
        """
        return 2 * self.rank * (self.plain + self.value)

    def is_decompressing_cheaper(self, queries: _N, contexts: _N) -> Any:
        """Return True if attention with K and V takes fewer FLOPs than attention with the latents.

        K and V of the `queries` own tokens are free: these tokens then need no projection of queries and results.

        Args:
            queries: query tokens at the end of each sequence; an integer or an array.
            contexts: tokens of each sequence, queries included.
        """
        earlier = contexts - queries
        pairs = queries * earlier + queries * (queries + 1) // 2
        return pairs * self.saved > earlier * self.made


def decompressed_attention_cost(
    tokens: int, pairs: int, kv_tokens: int, heads: int, sizes: LatentSizes, itemsize: int
) -> Cost:
    """Return the cost of attention with K and V of each head over `kv_tokens` keys; heads share the rotated values."""
    moved = tokens * heads * (sizes.plain + sizes.turned + sizes.value)
    moved += kv_tokens * (heads * (sizes.plain + sizes.value) + sizes.turned)
    return Cost(pairs * heads * sizes.pair, itemsize * moved)


def latent_store_cost(tokens: int, heads: int, rank: int, rotary_dim: int, itemsize: int) -> Cost:
    """Return the cost of rotating q and the shared k (3 operations per value) and storing both and the latent.

    cos and sin are read in float32.
    """
    turned = (heads + 1) * rotary_dim
    return Cost(3 * tokens * turned, tokens * (2 * itemsize * (turned + rank) + 4 * rotary_dim + 8))


def merge_state_cost(parts: int, tokens: int, heads: int, head_dim: int, itemsize: int) -> Cost:
    """Return the cost of merging parts of attention: 2 operations per value; parts and log-sum-exps are read once."""
    values, sums = tokens * heads * head_dim, 4 * tokens * heads
    return Cost(2 * parts * values, (parts + 1) * (values * itemsize + sums))


def gated_activation_cost(tokens: int, intermediate: int, itemsize: int) -> Cost:
    """Return the cost of act(gate) * up: 5 operations per output value; both halves are read and one is written."""
    return Cost(5 * tokens * intermediate, 3 * tokens * intermediate * itemsize)


def activation_cost(tokens: int, intermediate: int, itemsize: int) -> Cost:
    """Return the cost of act(x): 4 operations per value."""
    return Cost(4 * tokens * intermediate, 2 * tokens * intermediate * itemsize)


def scale_cost(tokens: int, width: int, itemsize: int) -> Cost:
    """Return the cost of multiplying each value by the same number."""
    return Cost(tokens * width, 2 * tokens * width * itemsize)


def low_rank_cost(tokens: int, adapters: int, inputs: int, outputs: int, rank: int, itemsize: int) -> Cost:
    """Return the cost of adding B A x to a product in float32 for tokens that have an adapter.

    Args:
        tokens: tokens that have an adapter of this rank.
        adapters: distinct adapters of these tokens; the factors of each are read once.
        inputs: inputs of the product.
        outputs: outputs of the product.
        rank: rank of the adapters.
        itemsize: bytes of an activation.
    """
    width = inputs + outputs
    moved = (
        itemsize * tokens * (inputs + 2 * rank) + 12 * tokens * outputs + itemsize * adapters * rank * width
    )
    return Cost(tokens * (2 * rank * width + outputs), moved)


def cap_cost(rows: int, vocab: int) -> Cost:
    """Return the cost of cap × tanh(logit / cap) of float32 logits: 3 operations per logit."""
    return Cost(3 * rows * vocab, 2 * rows * vocab * 4)


def sample_cost(rows: int, vocab: int, itemsize: int, drawn: int = 0) -> Cost:
    """Return the cost of sampling: one comparison per logit, and 10 more in rows that are drawn.

    The 10 are: maximum, subtraction, division, softmax (4), the threshold of min-p, comparison, cumulative sum. The
    cost of top-k and top-p is not counted, because it depends on the probabilities.

    Args:
        rows: sampled rows.
        vocab: logits of a row.
        itemsize: bytes of a logit.
        drawn: rows with a temperature above 0.
    """
    return Cost((rows + 10 * drawn) * vocab, rows * (vocab * itemsize + 8))


def penalise_cost(tokens: int, distinct: int, said: int, itemsize: int) -> Cost:
    """Return the cost of penalties.

    Args:
        tokens: tokens of all prompts and answers, which are read.
        distinct: distinct tokens, whose logits are compared, divided or multiplied, and written.
        said: distinct tokens of answers, whose penalties are counted, summed and subtracted.
        itemsize: bytes of a logit.
    """
    return Cost(3 * distinct + 3 * said, 4 * tokens + 2 * distinct * itemsize)


def mask_cost(rows: int, vocab: int, masked: int, itemsize: int) -> Cost:
    """Return the cost of reading one bit per token and writing the `masked` logits of all rows."""
    return Cost(0, rows * (-(-vocab // 32) * 4 + 4) + masked * itemsize)


def log_probabilities_cost(rows: int, vocab: int, most: int, itemsize: int) -> Cost:
    """Return the cost of the maximum and a log-softmax (4 operations per logit), and of writing `most` top tokens.

    The sort in torch is not counted.
    """
    return Cost(5 * rows * vocab, rows * (vocab * itemsize + 8 + 4 + 12 * most))


@dataclass(frozen=True, slots=True)
class StepShape:
    """The amount of work of one engine step."""

    tokens: int  # query tokens
    sampled: int  # rows whose logits are computed
    pairs: int  # attended (query, key) pairs, summed over layers (their sliding windows may differ)
    kv_tokens: int  # distinct cached tokens read, summed over layers
    copied: int = 0  # cached tokens that are copied, in each layer with a KV cache
    adapted: int = 0  # query tokens that have an adapter
    adapters: int = 0  # distinct adapters of these tokens


@dataclass(frozen=True, slots=True)
class Decompressing:
    """FLOPs of attention over latents if K and V of each head are computed from them.

    Attributes:
        pair: FLOPs of a (query, key) pair, averaged over `layers` layers.
        earlier: FLOPs of computing K and V of a key before the step's own tokens.
        layers: number of layers.
    """

    pair: int
    earlier: int
    layers: int

    def flops(self, step: StepShape) -> int:
        """Return the FLOPs of a step in which all K and V are computed."""
        return self.pair * step.pairs + self.earlier * max(0, step.kv_tokens - self.layers * step.tokens)


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """The cost of an operator in a step, summed over its layers: a fixed cost, and a cost per unit of a StepShape.

    The engine chooses `decompressing` per sequence. A step with both prefill and decode therefore takes fewer FLOPs
    than counted here; the bytes are about the same.

    Attributes:
        step: fixed cost of a step, such as reading weights.
        expert: cost of each distinct expert that has tokens.
        only_sampled: True if the operator runs only in steps that sample.
        experts: experts of a layer.
        chosen: experts per token.
        decompressing: an alternative computation, which is used if it takes fewer FLOPs.
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
    decompressing: Decompressing | None = None

    @property
    def useful_pair(self) -> int:
        """Return the FLOPs of a (query, key) pair in the cheaper of the two ways."""
        return (
            self.pair.flops if self.decompressing is None else min(self.pair.flops, self.decompressing.pair)
        )

    def __add__(self, other: OperatorCost) -> OperatorCost:
        """Return the cost of both as one operator, with the kind of `other`."""
        parts = [getattr(self, part) + getattr(other, part) for part in _PARTS]
        return replace(other, name=self.name, **dict(zip(_PARTS, parts, strict=True)))

    def __mul__(self, times: int) -> OperatorCost:
        return replace(self, **{part: getattr(self, part) * times for part in _PARTS})

    def of(self, step: StepShape) -> Cost:
        """Return the cost of the operator in one step; zero if the operator does not run."""
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
            flops = min(flops, self.decompressing.flops(step))
        return Cost(flops, moved, coded)


_PARTS = ("step", "token", "sampled", "pair", "kv_token", "copied", "expert", "adapted", "adapter")

OperatorKind = Literal["linear", "attention", "sampling", "elementwise"]
OPERATOR_KINDS: tuple[OperatorKind, ...] = get_args(OperatorKind)
# Operations per byte of a token: a matrix product has hundreds, any other operator at most three
PRODUCT_INTENSITY = 8


def operator_kind(operator: OperatorCost) -> OperatorKind:
    """Return the kind of an operator. `sampling` includes the product of the head, which only sampled rows need."""
    if operator.pair.flops:
        return "attention"
    if operator.only_sampled:
        return "sampling"
    if operator.experts or operator.token.flops > PRODUCT_INTENSITY * operator.token.bytes:
        return "linear"
    return "elementwise"


@dataclass(frozen=True, slots=True)
class ModelCost:
    """The costs of a model's operators and a few totals, without its topology."""

    operators: tuple[OperatorCost, ...]
    windows: tuple[int | None, ...]  # per layer with attention: keys that a query sees; None: all
    parameters: int  # weights of linear layers, without the head
    active_parameters: int  # the part of `parameters` that one token uses, without experts it does not use
    head_parameters: int
    # Per layer with a KV cache: its window, and bytes of a token
    caches: tuple[tuple[int | None, int], ...]
    itemsize: int  # bytes of an activation
    weight_itemsize: float  # bytes of a linear weight, less than `itemsize` if quantised
    causal: bool = True  # False: queries also see later keys, up to the window on each side
    adapted: bool = False  # True if tokens can have adapters

    @property
    def layers(self) -> int:
        """Return the number of layers with attention."""
        return len(self.windows)

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of K and V that a sequence of `tokens` tokens keeps, over all layers."""
        return sum(size * (tokens if window is None else min(tokens, window)) for window, size in self.caches)

    def seen(self, tokens: int) -> int:
        """Return the number of `tokens` cached tokens that the next query sees, itself included, summed over layers."""
        return sum(tokens if window is None else min(tokens, window) for window in self.windows)

    def pairs(self, tokens: int) -> int:
        """Return the (query, key) pairs of a whole prompt, summed over layers."""
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
        """Return the cost that each operator adds, by name, if the same work takes one step more.

        The weights are read again, and at least the experts of one token.
        """
        return {
            operator.name: operator.step + operator.expert * operator.chosen for operator in self.operators
        }

    def model_flops(self, step: StepShape) -> int:
        """Return the useful FLOPs of a step, as MFU counts them.

        These are 2 × active parameters × tokens, the head for sampled rows, and the products of attention. Attention
        over latents always counts in its cheaper form, whichever form the step uses.
        """
        dense = self.active_parameters * step.tokens + self.head_parameters * step.sampled
        return 2 * dense + self.pair_flops * step.pairs

    @property
    def pair_flops(self) -> int:
        """Return the useful FLOPs of a (query, key) pair."""
        return sum(operator.useful_pair for operator in self.operators)


def step_total(costs: dict[str, Cost]) -> Cost:
    """Return the total cost of a step's operators."""
    return sum(costs.values(), Cost())


def roofline_seconds(costs: dict[str, Cost], peaks: Peaks) -> float:
    """Return the sum of the operators' roofline bounds; operators run in sequence."""
    return sum(cost.seconds(peaks) for cost in costs.values())
