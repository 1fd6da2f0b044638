"""Counts what a job's adapters take: memory, and in a step products and bytes. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from batchinfer.models.adapters.stored_adapter import StoredAdapter
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.cost import Cost, ModelCost, OperatorCost, low_rank_cost

MIN_RANK = 16  # of a place: the least inner dimension of a tile
# Of a GPU's places, however large adapters are: with fewer, rows of one would wait for those of another
MIN_PLACES = 8


@dataclass(frozen=True, slots=True)
class ChangedProduct:
    """A product that adapters change: what it reads and gives for a token, and the ranks of those that change it."""

    inputs: int
    outputs: int
    ranks: tuple[int, ...]

    @property
    def width(self) -> int:
        """Values of factors for each rank."""
        return self.inputs + self.outputs


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """The sizes of `count` adapters, and of the products that they change."""

    count: int
    products: tuple[ChangedProduct, ...]

    @property
    def values(self) -> int:
        """Count the values of all factors, each pair as large as its product."""
        return sum(product.width * sum(product.ranks) for product in self.products)

    @property
    def place_values(self) -> int:
        """Count the values of a place on a GPU, which has room for any of the adapters."""
        return sum(product.width * max(MIN_RANK, *product.ranks) for product in self.products)

    def places(self, room: int, itemsize: int) -> int | None:
        """Return how many adapters are on a GPU at a time that has so many bytes for them; None: all."""
        found = max(MIN_PLACES, room // max(1, self.place_values * itemsize) - 1)  # one place is of zeros
        return found if found < self.count else None

    def mean_cost(self, itemsize: int, tokens: int, adapters: int) -> Cost:
        """Return what tokens that have an adapter, and adapters that tokens have, cost in the mean of all."""
        costs = (
            low_rank_cost(tokens, adapters, product.inputs, product.outputs, rank, itemsize)
            for product in self.products
            for rank in product.ranks
        )
        whole = sum(costs, Cost())
        return Cost(whole.flops // self.count, whole.bytes // self.count)

    def with_cost(self, cost: ModelCost) -> ModelCost:
        """Return the cost of a model with these adapters beside it."""
        size = cost.itemsize
        own = OperatorCost("adapters", adapted=self.mean_cost(size, 1, 0), adapter=self.mean_cost(size, 0, 1))
        return replace(cost, operators=(*cost.operators, own), adapted=True)


def adapter_sizes(spec: ModelSpec, adapters: Sequence[StoredAdapter]) -> AdapterSizes | None:
    """Return the sizes of adapters that stand beside their model; None where there are none."""
    beside = [adapter for adapter in adapters if not adapter.config.dora]
    return AdapterSizes(len(beside), tuple(_products(spec, beside))) if beside else None


def _products(spec: ModelSpec, adapters: Sequence[StoredAdapter]) -> Iterator[ChangedProduct]:
    for index, layer in enumerate(spec.layers):
        for linear in layer.linears:
            found = (adapter.changed.get((index, linear.name), ()) for adapter in adapters)
            ranks = tuple(sum(module.rank for module in modules) for modules in found if modules)
            if ranks:
                yield ChangedProduct(linear.inputs, linear.outputs, ranks)
