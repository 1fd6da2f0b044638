"""The costs of all operators: what each computes and has to move, as plain integers.

Importable without torch, so that the planner and the report can read it. FLOPs count a multiply-add as two.
Bytes count each operand once: what has to cross the memory bus when nothing is read twice. `seconds` is the
roofline bound of Williams et al. (2009): max(flops / peak, bytes / bandwidth).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

from batchinfer_kernels.arithmetic import CacheDtype

_N = TypeVar("_N", int, Any)  # integers, or arrays of them
# Inputs whose codes are packed together, as batchinfer_kernels.quantized_matmul packs them
PACKED_TOGETHER = 128


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peaks of the hardware: FLOP/s in the dtype at hand, and bytes/s."""

    flops_per_s: float
    bytes_per_s: float
    coded_ops_per_s: float | None = None  # of quantised linear layers, in int8 or fp8; None: as flops_per_s

    @property
    def fastest(self) -> float:
        """Operations a second that nothing here exceeds."""
        return max(self.flops_per_s, self.coded_ops_per_s or 0.0)

    def part(self, parts: int) -> Peaks:
        """Return the peaks of one of `parts` equal parts of the hardware."""
        integer = None if self.coded_ops_per_s is None else self.coded_ops_per_s / parts
        return Peaks(self.flops_per_s / parts, self.bytes_per_s / parts, integer)

    def times(self, devices: int) -> Peaks:
        """Return the peaks of several devices like this one together."""
        integer = None if self.coded_ops_per_s is None else self.coded_ops_per_s * devices
        return Peaks(self.flops_per_s * devices, self.bytes_per_s * devices, integer)


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs and bytes of one operator call, or of several one after the other."""

    flops: int = 0  # all operations, those on integers included
    bytes: int = 0
    coded_ops: int = 0  # how many of them multiply and add codes of 8 bits

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.coded_ops + other.coded_ops)

    def __sub__(self, other: Cost) -> Cost:
        return self + other * -1

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times, self.coded_ops * times)

    def seconds(self, peaks: Peaks) -> float:
        """The least time that this cost can take on hardware with these peaks.

        Integer and floating-point operations share their units, so their times add up.
        """
        integer = self.coded_ops / (peaks.coded_ops_per_s or peaks.flops_per_s)
        computing = (self.flops - self.coded_ops) / peaks.flops_per_s + integer
        return max(computing, self.bytes / peaks.bytes_per_s)


def embedding_cost(tokens: int, hidden: int, itemsize: int) -> Cost:
    """Rows of the embedding table read and written once."""
    return Cost(0, 2 * tokens * hidden * itemsize)


def linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int, weight_itemsize: int) -> Cost:
    """y = x W^T: the weight read once however many tokens there are."""
    moved = itemsize * tokens * (inputs + outputs) + weight_itemsize * inputs * outputs
    return Cost(2 * tokens * inputs * outputs, moved)


def sparse_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int) -> Cost:
    """Return the cost of a linear layer with a weight of which two of each four inputs are zeros, that are neither read
    nor multiplied; two bits of each other value say where it stands."""
    kept = inputs * outputs // 2
    moved = itemsize * (tokens * (inputs + outputs) + kept) + -(-kept // 4)
    return Cost(2 * tokens * kept, moved)


def quantized_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int) -> Cost:
    """Return the cost of a linear layer with an int8 weight and its scales: a token's activations are quantised (3
    operations a value: compare, multiply, round; 2 divisions a token) and its sums scaled (2 each). The quantised
    activations move nothing."""
    products = 2 * tokens * inputs * outputs
    moved = itemsize * tokens * (inputs + outputs) + inputs * outputs + 4 * outputs
    return Cost(products + tokens * (3 * inputs + 2 * outputs + 2), moved, products)


def int4_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int, group: int) -> Cost:
    """Return the cost of a linear layer with an int4 weight that has a scale for each output and group of inputs, and
    activations in int8: as `quantized_linear_cost`, and each sum of a group is multiplied with its scale, and added."""
    groups = -(-inputs // group)
    cost = quantized_linear_cost(tokens, inputs, outputs, itemsize)
    saved = inputs * outputs - -(-inputs // 2) * outputs + 4 * outputs * (1 - groups)
    return Cost(cost.flops + 2 * tokens * groups * outputs, cost.bytes - saved, cost.coded_ops)


def fp8_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int) -> Cost:
    """Return the cost of a linear layer with a float8_e4m3fn weight and its scales: as `quantized_linear_cost`, and
    each value is bounded before it is rounded. The caller chooses the peak."""
    cost = quantized_linear_cost(tokens, inputs, outputs, itemsize)
    return Cost(cost.flops + tokens * inputs, cost.bytes)


def block_fp8_linear_cost(
    tokens: int, inputs: int, outputs: int, itemsize: int, block: tuple[int, int] = (128, 128)
) -> Cost:
    """Return the cost of a linear layer with a float8_e4m3fn weight that has a scale for each `block` (outputs,
    inputs). A token has a scale for each group of inputs (2 divisions); the sum of a group is multiplied with the
    product of two scales, and added (3 each)."""
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
    """A linear layer of each of several experts: `rows` multiply the weight of one expert each, and the weights of the
    `hit` experts that have rows are read. `tokens`: how many different rows of x there are, all if not given."""
    moved = itemsize * ((rows if tokens is None else tokens) * inputs + rows * outputs)
    return Cost(2 * rows * inputs * outputs, moved + weight_itemsize * hit * inputs * outputs)


def quantized_grouped_linear_cost(
    rows: int, hit: int, inputs: int, outputs: int, itemsize: int, tokens: int | None = None
) -> Cost:
    """Return the cost of `grouped_linear_cost` with int8 weights and their scales; each row is quantised."""
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
    """Return the cost of `grouped_linear_cost` with weights in int4 that have a scale for each output and group of
    inputs. `coded`: each row is quantised to int8, as for `int4_linear_cost`; else weights are widened, which is left
    out, as how often depends on the tiles."""
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
    """Return the cost of `grouped_linear_cost` with weights in MXFP4: half a byte a value, and one for each 32.
    Widening is left out: how often a weight is widened depends on the tiles."""
    plain = grouped_linear_cost(rows, hit, inputs, outputs, itemsize, 0, tokens)
    return plain + Cost(0, hit * outputs * (inputs // 2 + inputs // 32))


def mxfp4_linear_cost(tokens: int, inputs: int, outputs: int, itemsize: int) -> Cost:
    """Return the cost of a linear layer with a weight in MXFP4, which is multiplied as the values that it stands for:
    half a byte a value, and one for each 32. Widening is left out, as in mxfp4_grouped_linear_cost."""
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
    """Return the cost of `grouped_linear_cost` with float8_e4m3fn weights of which blocks share a scale; each row is
    quantised."""
    plain = grouped_linear_cost(rows, hit, inputs, outputs, itemsize, 1, tokens)
    one = block_fp8_linear_cost(rows, inputs, outputs, itemsize, block)
    scales = 4 * hit * -(-inputs // block[1]) * -(-outputs // block[0])
    return Cost(one.flops, plain.bytes + scales, plain.flops)


def expected_hit(tokens: int, experts: int, chosen: int) -> int:
    """Return how many different experts `tokens` tokens use if each chooses `chosen` of them evenly, rounded."""
    return round(experts * (1 - (1 - chosen / experts) ** tokens))


def routing_cost(tokens: int, experts: int, chosen: int) -> Cost:
    """A softmax (4 a logit) of float32 logits; a float32 weight and a number of 8 bytes for each chosen expert. What
    choosing takes in torch is left out."""
    return Cost(4 * tokens * experts, tokens * (4 * experts + 12 * chosen))


def combine_cost(tokens: int, chosen: int, hidden: int, itemsize: int) -> Cost:
    """A token's results weighted (1 a value) and added (1 a value but the first); read once each with their weights and
    places, the sums written."""
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
    """y = x W^T with a weight of packed codes, whose rows are filled up to whole spans.

    Without `group` int8: sums are multiplied with their output's float32 scale. With it int4: 8 is taken off a code,
    which is multiplied with the scale of its group of inputs, `scale_bytes` (None: `itemsize`), after its zero is taken
    off where there are `zeros`, of a byte each.
    """
    products, values = 2 * tokens * inputs * outputs, inputs * outputs
    packed = -(-inputs // PACKED_TOGETHER) * PACKED_TOGETHER * outputs
    moved = itemsize * tokens * (inputs + outputs)
    if group is None:
        return Cost(products + tokens * outputs, moved + packed + 4 * outputs)
    grouped = -(-inputs // group) * outputs * ((scale_bytes or itemsize) + zeros)
    return Cost(products + (2 + zeros) * values, moved + packed // 2 + grouped)


# What a product with many rows reaches of the peak where its weight is widened in the registers that it is multiplied
# from: half, as published kernels do (Frantar et al., 2024, "Marlin", beside cuBLAS). Not measured
REGISTERS_SHARE = 0.5
# Of the room for the values of a weight: what stays in the L2 cache of large GPUs (50 MiB and more on H100 and later)
# beside what else is read, and makes parts of thousands of outputs. Not measured
PANEL_BYTES = 64 << 20
MOST_PANEL_ROWS = 1 << 20  # more rows than a step has


def widening_cost(
    inputs: int,
    outputs: int,
    itemsize: int,
    *,
    group: int,
    zeros: bool = False,
    scale_bytes: int | None = None,
) -> Cost:
    """Return the cost of widening a weight of codes in 4 bits to values, which are written; see
    weight_only_linear_cost."""
    read = weight_only_linear_cost(
        0, inputs, outputs, itemsize, group=group, zeros=zeros, scale_bytes=scale_bytes
    )
    return read + Cost(0, itemsize * inputs * outputs)


def least_panel_rows(peaks: Peaks, inputs: int, outputs: int, itemsize: int, widened: Cost) -> int:
    """Return the fewest rows from which it takes less time to widen a weight of codes in 4 bits, which costs `widened`,
    and to multiply with its values than to widen it in registers, which reaches REGISTERS_SHARE of the peak. What
    widening itself computes is left out."""
    weight_bytes = widened.bytes - itemsize * inputs * outputs

    def pays(rows: int) -> bool:
        slow = Peaks(peaks.flops_per_s * REGISTERS_SHARE, peaks.bytes_per_s)
        multiplied = linear_cost(rows, inputs, outputs, itemsize, itemsize)
        apart = widened.bytes / peaks.bytes_per_s
        read = weight_bytes + itemsize * rows * (inputs + outputs)
        return apart + multiplied.seconds(peaks) < Cost(multiplied.flops, read).seconds(slow)

    return bisect_left(range(MOST_PANEL_ROWS), True, key=pays)


def rms_norm_cost(tokens: int, hidden: int, itemsize: int, residual: bool) -> Cost:
    """Square, sum, scale, weight (4 a value; 5 with the residual added), and 2 a row for its root; read x and the
    weight, write y, and both again for a residual."""
    values = tokens * hidden
    moved = (4 if residual else 2) * values * itemsize + hidden * itemsize
    return Cost((5 if residual else 4) * values + 2 * tokens, moved)


def layer_norm_cost(tokens: int, hidden: int, itemsize: int, residual: bool, biased: bool = True) -> Cost:
    """Mean, difference, square, sum, scale, weight (6 a value; 1 more each for a bias and an added residual), and 2 a
    row for its root; bytes as for an RMSNorm, the bias included."""
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
    """Rotate q and k (3 a rotated value), write q back and k, v to the cache; cos and sin are read in float32. Of no KV
    heads: q alone, of a layer that reads what another one has written.

    `rotary_dim`: values of a head that are rotated, all if not given. `normed`: q and k pass an RMSNorm before.
    `codes`: what the cache keeps, of a byte each, with a float32 scale for each head of a token (a value is compared,
    multiplied, rounded, for fp8 bounded too; a head of a token has 2 divisions).
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
    """K and V of `tokens` cached tokens are read and written; `tensors`: 1 where both are the same latents.
    `coded`: they are codes of a byte, with a scale for each head."""
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
    """Scaled dot-product attention over a paged cache.

    `pairs` counts the (query, key) pairs that are attended, over all sequences; `kv_tokens` the distinct cached
    tokens read, a block that several sequences share counted once. `coded`: they are codes of a byte, with a float32
    scale for each head of a token.
    """
    cached = 2 * kv_tokens * kv_heads * (head_dim + 4 if coded else head_dim * itemsize)
    return Cost(4 * pairs * q_heads * head_dim, 2 * tokens * q_heads * head_dim * itemsize + cached)


def latent_attention_cost(
    tokens: int, pairs: int, kv_tokens: int, heads: int, width: int, rank: int, itemsize: int
) -> Cost:
    """Attention over a cache of latents: a query is multiplied with `width` values of a token, and its probability with
    `rank`. Counts as for `attention_cost`; what is read of a token serves K and V."""
    moved = tokens * heads * (width + rank) + kv_tokens * width
    return Cost(2 * pairs * heads * (width + rank), itemsize * moved)


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The values of a head of multi-head latent attention: of a latent, which K and V of all heads are made of; of a
    query without a position, and of its rotated ones; of V."""

    rank: int
    plain: int
    turned: int
    value: int

    @property
    def saved(self) -> int:
        """Return how many FLOPs fewer a (query, key) pair of a head takes with K and V than with the latent."""
        return 2 * (2 * self.rank + self.turned) - self.pair

    @property
    def pair(self) -> int:
        """Return the FLOPs of a (query, key) pair of a head with K and V."""
        return 2 * (self.plain + self.turned + self.value)

    @property
    def made(self) -> int:
        """Return the FLOPs that make K and V of a key for a head. As many take a query to the latent and its result out
        of it."""
        return 2 * self.rank * (self.plain + self.value)

    def decompressing_pays(self, queries: _N, contexts: _N) -> Any:
        """Whether K and V of a whole context, made for its last `queries` tokens, take fewer operations than these
        tokens with the latents; of a sequence, or of many. Those of the queries' own tokens cost nothing: their queries
        and results are not taken to the latent and out of it."""
        earlier = contexts - queries
        pairs = queries * earlier + queries * (queries + 1) // 2
        return pairs * self.saved > earlier * self.made


def decompressed_attention_cost(
    tokens: int, pairs: int, kv_tokens: int, heads: int, sizes: LatentSizes, itemsize: int
) -> Cost:
    """Attention with K and V of each head; `kv_tokens` keys, of which all heads share the rotated values."""
    moved = tokens * heads * (sizes.plain + sizes.turned + sizes.value)
    moved += kv_tokens * (heads * (sizes.plain + sizes.value) + sizes.turned)
    return Cost(pairs * heads * sizes.pair, itemsize * moved)


def latent_store_cost(tokens: int, heads: int, rank: int, rotary_dim: int, itemsize: int) -> Cost:
    """Rotate q and the k that all heads share (3 a value), write q back, and k with the latent to the cache; cos and
    sin are read in float32."""
    turned = (heads + 1) * rotary_dim
    return Cost(3 * tokens * turned, tokens * (2 * itemsize * (turned + rank) + 4 * rotary_dim + 8))


def merge_state_cost(parts: int, tokens: int, heads: int, head_dim: int, itemsize: int) -> Cost:
    """Parts of attention weighted and added (2 a value); each read once with its log-sum-exp, the result written."""
    values, sums = tokens * heads * head_dim, 4 * tokens * heads
    return Cost(2 * parts * values, (parts + 1) * (values * itemsize + sums))


def gated_activation_cost(tokens: int, intermediate: int, itemsize: int) -> Cost:
    """act(gate) * up: five a value; reads both halves, writes one."""
    return Cost(5 * tokens * intermediate, 3 * tokens * intermediate * itemsize)


def activation_cost(tokens: int, intermediate: int, itemsize: int) -> Cost:
    """act(x): four a value; reads it, writes it."""
    return Cost(4 * tokens * intermediate, 2 * tokens * intermediate * itemsize)


def scale_cost(tokens: int, width: int, itemsize: int) -> Cost:
    """Each value multiplied with the same number: read and written."""
    return Cost(tokens * width, 2 * tokens * width * itemsize)


def low_rank_cost(tokens: int, adapters: int, inputs: int, outputs: int, rank: int, itemsize: int) -> Cost:
    """Return the cost of adding B A x to a product: A x and B of that for tokens that have an adapter of this rank,
    which is then added, in float32; the factors of each of the adapters that they have are read once."""
    width = inputs + outputs
    moved = (
        itemsize * tokens * (inputs + 2 * rank) + 12 * tokens * outputs + itemsize * adapters * rank * width
    )
    return Cost(tokens * (2 * rank * width + outputs), moved)


def cap_cost(rows: int, vocab: int) -> Cost:
    """cap × tanh(logit / cap) of float32 logits: three a value; read and written."""
    return Cost(3 * rows * vocab, 2 * rows * vocab * 4)


def sample_cost(rows: int, vocab: int, itemsize: int, drawn: int = 0) -> Cost:
    """One comparison a logit; in the `drawn` rows 10 more: find the maximum, subtract it, divide, softmax (4), find
    what min-p compares with, compare, cumulate. Logits are read once, token ids written. What top-k and top-p take is
    left out: it depends on the probabilities."""
    return Cost((rows + 10 * drawn) * vocab, rows * (vocab * itemsize + 8))


def penalise_cost(tokens: int, distinct: int, said: int, itemsize: int) -> Cost:
    """`tokens` are read; of the `distinct` ones logits are compared, divided, multiplied and written; for each one
    that was `said` in answers a penalty is counted, summed up and subtracted."""
    return Cost(3 * distinct + 3 * said, 4 * tokens + 2 * distinct * itemsize)


def mask_cost(rows: int, vocab: int, masked: int, itemsize: int) -> Cost:
    """A bit of every token is read, and the logits of the `masked` tokens of all rows are written. No arithmetic."""
    return Cost(0, rows * (-(-vocab // 32) * 4 + 4) + masked * itemsize)


def log_probabilities_cost(rows: int, vocab: int, most: int, itemsize: int) -> Cost:
    """The maximum and a log-softmax (4 a logit); the sort that it takes in torch is left out. Logits and chosen ids are
    read, and of each row 1 + `most` numbers and `most` ids written."""
    return Cost(5 * rows * vocab, rows * (vocab * itemsize + 8 + 4 + 12 * most))


@dataclass(frozen=True, slots=True)
class StepShape:
    """How much one engine step runs."""

    tokens: int  # query tokens
    sampled: int  # rows whose logits are computed
    pairs: int  # (query, key) pairs attended, summed over layers (their sliding windows may differ)
    kv_tokens: int  # distinct cached tokens read, summed over layers
    copied: int = 0  # cached tokens that are copied, in every layer that keeps K and V
    adapted: int = 0  # query tokens that have an adapter
    adapters: int = 0  # how many adapters these have


@dataclass(frozen=True, slots=True)
class Decompressing:
    """FLOPs of attention over latents where K and V of each head are made of them: of a pair, and of a key that comes
    before the step's tokens, in a mean one of so many layers."""

    pair: int
    earlier: int
    layers: int

    def flops(self, step: StepShape) -> int:
        """Return the FLOPs of a step, all of whose K and V are made."""
        return self.pair * step.pairs + self.earlier * max(0, step.kv_tokens - self.layers * step.tokens)


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """The cost of an operator in a step, over all its layers: `step` however much it runs (reading weights), and a cost
    for each of the things that a StepShape counts. One that is `only_sampled` does not run in a step that samples
    nothing.

    `expert`: for each expert that has tokens, of `experts` in a layer, of which a token uses `chosen`. `decompressing`:
    another way of computing it, which is taken where it has fewer FLOPs. It is chosen for each sequence, so that a step
    which both reads and answers has fewer FLOPs than what is counted here. Bytes are about as many.
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
        """Return the FLOPs of a (query, key) pair, in whichever way has fewer."""
        return (
            self.pair.flops if self.decompressing is None else min(self.pair.flops, self.decompressing.pair)
        )

    def __add__(self, other: OperatorCost) -> OperatorCost:
        """Return the cost of both together, as one operator: `other` says what kind of operator it is."""
        parts = [getattr(self, part) + getattr(other, part) for part in _PARTS]
        return replace(other, name=self.name, **dict(zip(_PARTS, parts, strict=True)))

    def __mul__(self, times: int) -> OperatorCost:
        return replace(self, **{part: getattr(self, part) * times for part in _PARTS})

    def of(self, step: StepShape) -> Cost:
        """Its cost in one step; nothing where no row passes it."""
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
        for count, cost in zip(counts, parts, strict=True):  # every step of a run comes past here
            flops += count * cost.flops
            moved += count * cost.bytes
            coded += count * cost.coded_ops
        if self.decompressing is not None:
            flops = min(flops, self.decompressing.flops(step))
        return Cost(flops, moved, coded)


_PARTS = ("step", "token", "sampled", "pair", "kv_token", "copied", "expert", "adapted", "adapter")

OperatorKind = Literal["linear", "attention", "sampling", "elementwise"]
OPERATOR_KINDS: tuple[OperatorKind, ...] = get_args(OperatorKind)
# A product has hundreds of operations for each byte of a token, any other operator at most three.
PRODUCT_INTENSITY = 8


def operator_kind(operator: OperatorCost) -> OperatorKind:
    """Return the kind of work that an operator does. `sampling` is everything that only sampled rows pass, the head's
    product included."""
    if operator.pair.flops:
        return "attention"
    if operator.only_sampled:
        return "sampling"
    if operator.experts or operator.token.flops > PRODUCT_INTENSITY * operator.token.bytes:
        return "linear"
    return "elementwise"


@dataclass(frozen=True, slots=True)
class ModelCost:
    """All that counting needs of a model: what its operators cost, and a few sums. No topology: who knows the model
    makes it."""

    operators: tuple[OperatorCost, ...]
    windows: tuple[int | None, ...]  # of each layer with attention: how many keys a query sees; None: all
    parameters: int  # weights of linear maps, the head's not among them
    active_parameters: int  # of these, how many a token multiplies: not those of experts that it does not use
    head_parameters: int
    # Of each layer that keeps K and V: its window, bytes of a token
    caches: tuple[tuple[int | None, int], ...]
    itemsize: int  # bytes of an activation
    weight_itemsize: (
        float  # bytes of a weight of the linear layers, less than `itemsize` where they are quantised
    )
    causal: bool = (
        True  # whether a query sees earlier keys alone; else those of both sides, each as far as the window
    )
    adapted: bool = False  # whether tokens may have adapters

    @property
    def layers(self) -> int:
        """The number of layers with attention."""
        return len(self.windows)

    def kv_bytes(self, tokens: int) -> int:
        """Return the bytes of K and V that a sequence of `tokens` tokens keeps, over all layers."""
        return sum(size * (tokens if window is None else min(tokens, window)) for window, size in self.caches)

    def seen(self, tokens: int) -> int:
        """Return how many of `tokens` cached tokens the next query sees, itself included, summed over layers."""
        return sum(tokens if window is None else min(tokens, window) for window in self.windows)

    def pairs(self, tokens: int) -> int:
        """(query, key) pairs of a whole prompt, summed over layers."""
        total = 0
        for window in self.windows:
            growing = tokens if window is None else min(tokens, window)
            total += growing * (growing + 1) // 2 + (tokens - growing) * growing
        return total if self.causal else 2 * total - tokens * self.layers

    @property
    def quantized(self) -> bool:
        return self.weight_itemsize < self.itemsize

    def step(self, step: StepShape) -> dict[str, Cost]:
        """Operator name → its cost in one step, over all layers. An operator that no row passes is not run: 0."""
        return {operator.name: operator.of(step) for operator in self.operators}

    def another_step(self) -> dict[str, Cost]:
        """Operator name → what it adds to the same work if that takes one step more: weights are read again, of experts
        those of one token at the least."""
        return {
            operator.name: operator.step + operator.expert * operator.chosen for operator in self.operators
        }

    def model_flops(self, step: StepShape) -> int:
        """Useful FLOPs as MFU counts them: 2 × active parameters × tokens, the head for sampled rows, and the products
        of attention; over latents those with K and V of each head, where a device makes them of prompts, whichever way
        a step takes."""
        dense = self.active_parameters * step.tokens + self.head_parameters * step.sampled
        return 2 * dense + self.pair_flops * step.pairs

    @property
    def pair_flops(self) -> int:
        """Useful FLOPs of a (query, key) pair."""
        return sum(operator.useful_pair for operator in self.operators)


def step_total(costs: dict[str, Cost]) -> Cost:
    """All operators of a step together."""
    return sum(costs.values(), Cost())


def roofline_seconds(costs: dict[str, Cost], peaks: Peaks) -> float:
    """Sum over operators of their bounds: operators follow one another, so their bounds add up."""
    return sum(cost.seconds(peaks) for cost in costs.values())
