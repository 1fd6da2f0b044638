"""The work of a calibration, and its outcome: the loss of the model on held-out rows. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

from batchinfer.core.statistics.quality import Quality
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.tensor_names import StoredParameter, layer_names
from batchinfer.models.spec.divisible import gated_halves, norm_readers
from batchinfer.models.spec.spec import AttentionSpec, ExpertsSpec, LayerSpec, LinearSpec

# An expert with fewer tokens is also calibrated on the tokens for which the router prefers it most. With 2 to 12 rows,
# 512 leaves up to 11 % less error in the hidden states of a small model than 128 (docs/measurements/quantisation.md)
MIN_EXPERT_TOKENS = 512
# Exponents of channel sizes to try; 0 means no scaling
POWERS = tuple(step / 10 for step in range(11))
# Evenly spaced outputs per product, by whose error the exponents are compared
OUTPUTS_TRIED = 512
HELD_OUT_OF = 3  # one row in this many is held out for the loss
STEP_TOKENS = 2048  # limit of tokens per step; a longer sequence is a step of its own
STRIPES = 8  # into which the symmetric X^T X is divided: nine sixteenths of it are computed
# Equal to the constant in batchinfer_kernels.int4_feedback, which needs torch; a test compares them
COLUMNS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class CalibrationOutcome:
    """The outcome of a calibration.

    Args:
        loss: The loss on held-out rows. None if there were none.
        experts: The number of calibrated experts, summed over layers.
        few: How many of the experts had fewer than MIN_EXPERT_TOKENS tokens, and were calibrated on other tokens, too.
    """

    loss: Quality | None
    experts: int = 0
    few: int = 0


@dataclass(frozen=True, slots=True)
class CalibrationWork:
    """The work of a calibration: counts of operations, from which its time is predicted.

    Args:
        products: FLOPs of matrix products in float32.
        factors: FLOPs of Cholesky factorisations and triangular inverses in float64.
        scaled: Weight values that are quantised to compare exponents or to find scales, once per exponent.
        made_up: Corrections of a weight value by the rounding error of an earlier column.
        sorted: Values of X^T X that are permuted into the order in which columns are rounded.
        weights: Weight values that are read, cast, packed and written.
    """

    products: int = 0
    factors: int = 0
    scaled: int = 0
    made_up: int = 0
    sorted: int = 0
    weights: int = 0

    def __add__(self, other: CalibrationWork) -> CalibrationWork:
        return CalibrationWork(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: int) -> CalibrationWork:
        return CalibrationWork(*(one * times for one in astuple(self)))


def calibration_work(checkpoint: Checkpoint, tokens: int, group: int) -> CalibrationWork:
    """Return the work of calibrating all layers of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        tokens: The number of tokens that calibration counts.
        group: Inputs per scale.
    """
    layers = Counter[tuple[LayerSpec, tuple[LinearSpec, ...]]]()
    for index, layer in enumerate(checkpoint.spec.layers):
        names = layer_names(checkpoint.spec, index, checkpoint.prefixes)
        layers[layer, tuple(rounded_linears(layer, names, group))] += 1
    found = CalibrationWork()
    for (layer, rounded), times in layers.items():
        found += sum(_parts(layer, rounded, tokens), CalibrationWork()) * times
    return found


def rounded_linears(layer: LayerSpec, names: Mapping[str, StoredParameter], group: int) -> list[LinearSpec]:
    """Return the matrix products of a layer whose weights calibration quantises.

    Each part of a weight must be a matrix of its own in the checkpoint, or, without experts, some rows of one. Experts
    are quantised in both products or in neither, as engines have one format per expert.

    Args:
        layer: The layer.
        names: Where the parameters of the layer are stored, by name.
        group: Inputs per scale, which must divide the inputs of a product.
    """
    found = [
        linear
        for linear in layer.linears
        if not (linear.exact or linear.heads)
        and linear.inputs % group == 0
        and all(_is_matrix(names[part], bool(linear.experts)) for part, _ in linear.parts)
    ]
    whole = sum(bool(linear.experts) for linear in found) == 2
    return [linear for linear in found if whole or not linear.experts]


def _is_matrix(place: StoredParameter, whole: bool) -> bool:
    """Return True if a parameter is a matrix (out, in), or some rows of one unless `whole`."""
    part = place.part
    return not place.rows and (part is None or not (whole or part.index is not None or part.transposed))


def _parts(layer: LayerSpec, rounded: Sequence[LinearSpec], tokens: int) -> Iterator[CalibrationWork]:
    for one in rounded:
        if not one.experts:
            yield CalibrationWork(products=2 * tokens * _computed_values(one.inputs))
            yield rounding_work(one.outputs, one.inputs)
    for one in _compared_products(layer, {one.name: one for one in rounded}):
        yield channel_work(one.outputs * max(1, one.experts), one.inputs)
    experts = [one for one in rounded if one.experts]
    if experts:
        yield _experts_work(layer, experts, tokens)
    yield CalibrationWork(weights=sum(linear.values for linear in layer.linears))


def _computed_values(inputs: int) -> int:
    """Return how many values of the symmetric X^T X are computed, (inputs, inputs), if done in STRIPES stripes."""
    stripe = -(-inputs // STRIPES)
    ends = (min(first + stripe, inputs) for first in range(0, inputs, stripe))
    return sum(stripe_end * min(stripe, inputs - at * stripe) for at, stripe_end in enumerate(ends))


def _compared_products(layer: LayerSpec, rounded: dict[str, LinearSpec]) -> Iterator[LinearSpec]:
    """Yield the products whose rounding errors are computed to choose factors of channels, once per set of channels.

    The second product of experts is not included: each expert has factors of its own.

    Args:
        layer: The layer.
        rounded: The products whose weights are rounded, by name.
    """
    kept = {linear.name for linear in layer.linears if linear.experts} - rounded.keys()
    for _, readers in norm_readers(layer):
        if not kept.isdisjoint(readers):
            continue
        yield from (rounded[name] for name in readers if name in rounded)
    for _, down in gated_halves(layer):
        if down in rounded and not rounded[down].experts:
            yield rounded[down]
    attention = layer.attention
    if isinstance(attention, AttentionSpec) and attention.kv_layer is None and "o" in rounded:
        yield rounded["o"]


def channel_work(outputs: int, inputs: int) -> CalibrationWork:
    """Return the work of comparing all exponents of channel sizes (POWERS) for a weight (outputs, inputs)."""
    tried = -(-outputs // -(-outputs // OUTPUTS_TRIED))
    products = 2 * tried * inputs * inputs
    return CalibrationWork(products=products, scaled=tried * inputs) * len(POWERS)


def rounding_work(outputs: int, inputs: int) -> CalibrationWork:
    """Return the work of rounding a weight (outputs, inputs) column by column, with feedback of rounding errors."""
    products = within = 0
    for first in range(0, inputs, COLUMNS_AT_ONCE):
        end = min(first + COLUMNS_AT_ONCE, inputs)
        columns = end - first
        products += 2 * outputs * columns * (inputs - end)
        within += columns * (columns - 1) // 2
    # Cholesky factorisation, and inverse
    factors = inputs**3 // 3 + inputs**3
    made_up = outputs * within
    return CalibrationWork(products + 2 * made_up, factors, outputs * inputs, made_up, inputs * inputs)


def _experts_work(layer: LayerSpec, both: list[LinearSpec], tokens: int) -> CalibrationWork:
    """Return the work of all experts of a layer, each on its share of `tokens`, at least MIN_EXPERT_TOKENS.

    Args:
        layer: The layer.
        both: The first and the second product of the experts.
        tokens: The number of tokens that calibration counts.
    """
    up, down = both
    fed = layer.feed_forward
    assert isinstance(fed, ExpertsSpec), "only they have experts"
    own = min(tokens, max(MIN_EXPERT_TOKENS, tokens * up.chosen // up.experts))
    read = 2 * own * (up.inputs * up.outputs + up.inputs**2 + down.inputs**2)
    each = CalibrationWork(products=read) + rounding_work(up.outputs, up.inputs)
    each += rounding_work(down.outputs, down.inputs)
    if any(name == down.name for _, name in gated_halves(layer)):
        each += channel_work(down.outputs, down.inputs)
    # Logits of the router, and X^T X of the inputs, for all tokens
    return each * up.experts + CalibrationWork(
        products=2 * tokens * layer.hidden * (up.experts + layer.hidden)
    )
