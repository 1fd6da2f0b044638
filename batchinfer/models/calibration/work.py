"""The work of a calibration, and its outcome: the loss of the model, on rows that it has not seen. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.tensor_names import StoredParameter, layer_names
from batchinfer.models.spec.divisible import gated_halves, norm_readers
from batchinfer.models.spec.spec import AttentionSpec, ExpertsSpec, LayerSpec, LinearSpec

# An expert that gets fewer tokens of the sample is calibrated on others, too: on those whose router prefers it most. On
# 2 to 12 rows 512 left up to 11 % less error of a small model's hidden states than 128 (docs/performance.md)
MIN_EXPERT_TOKENS = 512
# Exponents of the channels' sizes that are tried; 0: channels stay as they are
POWERS = tuple(step / 10 for step in range(11))
# Of each layer that reads the channels, evenly spread: powers are compared by them
OUTPUTS_TRIED = 512
HELD_OUT_OF = 3  # of so many rows one is held out: what the loss is measured on
STEP_TOKENS = 2048  # of a step of rows, but for a longer sequence, which is one by itself
STRIPES = 8  # of the products of inputs: nine sixteenths of them are computed, as they are symmetric
# As in batchinfer_kernels.int4_feedback, which needs torch; a test compares them
COLUMNS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss by rounding: how the prediction of the next token changes at `tokens` positions of answers. `kl`: the
    mean of KL(before ‖ after) in nats; `same`: the share of positions with the same most likely token."""

    kl: float
    same: float
    tokens: int


@dataclass(frozen=True, slots=True)
class CalibrationOutcome:
    """The outcome of a calibration. `loss`: None, if there was no row to measure it on. Of `experts`, those of all
    layers, `few` had fewer tokens of the sample than MIN_EXPERT_TOKENS, and were calibrated on those of others, too."""

    loss: Loss | None
    experts: int = 0
    few: int = 0


@dataclass(frozen=True, slots=True)
class CalibrationWork:
    """Counts of what is done once for all layers. `products`: FLOPs of matrix products in float32; `factors`: FLOPs of
    triangular factors in float64; `scaled`: values for whose groups scales were sought, as often as they were;
    `made_up`: values that made up for the error of one column before them; `sorted`: products of inputs that
    were put in the order of their columns; `weights`: values that are read, cast, packed and written."""

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
    """Return the work of all layers, for a search over so many tokens that count."""
    layers = Counter[tuple[LayerSpec, tuple[LinearSpec, ...]]]()
    for index, layer in enumerate(checkpoint.spec.layers):
        names = layer_names(checkpoint.spec, index, checkpoint.prefixes)
        layers[layer, tuple(rounded_linears(layer, names, group))] += 1
    found = CalibrationWork()
    for (layer, rounded), times in layers.items():
        found += sum(_parts(layer, rounded, tokens), CalibrationWork()) * times
    return found


def rounded_linears(layer: LayerSpec, names: Mapping[str, StoredParameter], group: int) -> list[LinearSpec]:
    """Return the linear layers whose weights become codes that the checkpoint's tensors, by their `names`, can hold:
    whole tensors, or outputs of them. Both of experts do, or none: engines have one format for an expert."""
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
    """Whether a parameter is a matrix of outputs, in a tensor that may have more of them if it is not to be `whole`."""
    part = place.part
    return not place.rows and (part is None or not (whole or part.index is not None or part.transposed))


def _parts(layer: LayerSpec, rounded: Sequence[LinearSpec], tokens: int) -> Iterator[CalibrationWork]:
    for one in rounded:
        if not one.experts:
            yield CalibrationWork(products=2 * tokens * _lower(one.inputs))
            yield rounding_work(one.outputs, one.inputs)
    for one in _searched(layer, {one.name: one for one in rounded}):
        yield channel_work(one.outputs * max(1, one.experts), one.inputs)
    experts = [one for one in rounded if one.experts]
    if experts:
        yield _experts_work(layer, experts, tokens)
    yield CalibrationWork(weights=sum(linear.values for linear in layer.linears))


def _lower(inputs: int) -> int:
    """Return how many of the products of inputs are computed."""
    stripe = -(-inputs // STRIPES)
    ends = (min(first + stripe, inputs) for first in range(0, inputs, stripe))
    return sum(stripe_end * min(stripe, inputs - at * stripe) for at, stripe_end in enumerate(ends))


def _searched(layer: LayerSpec, rounded: dict[str, LinearSpec]) -> Iterator[LinearSpec]:
    """Yield the products whose errors powers are compared by, each as often as its channels are divided; the halves of
    experts have a search of their own."""
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
    """Return the work of comparing powers by the outputs of a weight (outputs, inputs)."""
    tried = -(-outputs // -(-outputs // OUTPUTS_TRIED))
    products = 2 * tried * inputs * inputs
    return CalibrationWork(products=products, scaled=tried * inputs) * len(POWERS)


def rounding_work(outputs: int, inputs: int) -> CalibrationWork:
    """Return the work of rounding a weight (outputs, inputs), column by column."""
    products = within = 0
    for first in range(0, inputs, COLUMNS_AT_ONCE):
        end = min(first + COLUMNS_AT_ONCE, inputs)
        columns = end - first
        products += 2 * outputs * columns * (inputs - end)
        within += columns * (columns - 1) // 2
    # The factor of Cholesky, and its inverse
    factors = inputs**3 // 3 + inputs**3
    made_up = outputs * within
    return CalibrationWork(products + 2 * made_up, factors, outputs * inputs, made_up, inputs * inputs)


def _experts_work(layer: LayerSpec, both: list[LinearSpec], tokens: int) -> CalibrationWork:
    """Return the work of all experts of a layer, each on its share of the tokens, or on the least."""
    up, down = both
    fed = layer.feed_forward
    assert isinstance(fed, ExpertsSpec), "only they have experts"
    own = min(tokens, max(MIN_EXPERT_TOKENS, tokens * up.chosen // up.experts))
    read = 2 * own * (up.inputs * up.outputs + up.inputs**2 + down.inputs**2)
    each = CalibrationWork(products=read) + rounding_work(up.outputs, up.inputs)
    each += rounding_work(down.outputs, down.inputs)
    if any(name == down.name for _, name in gated_halves(layer)):
        each += channel_work(down.outputs, down.inputs)
    # What the router finds of all tokens, and the products of what all of them read
    return each * up.experts + CalibrationWork(
        products=2 * tokens * layer.hidden * (up.experts + layer.hidden)
    )
