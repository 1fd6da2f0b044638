"""The memory of a job's adapters, and their cost per step. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from batchinfer.models.adapters.stored_adapter import StoredAdapter
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.cost import Cost, ModelCost, OperatorCost, low_rank_cost

MIN_RANK = 16  # of a place on a GPU: the smallest inner dimension of a tile
# Places on a GPU, whatever their size: with fewer, rows would often wait for a place for their adapter
MIN_PLACES = 8


@dataclass(frozen=True, slots=True)
class ChangedProduct:
    """A product that adapters change: its inputs and outputs, and the ranks of the adapters that change it."""

    inputs: int
    outputs: int
    ranks: tuple[int, ...]

    @property
    def width(self) -> int:
        """Return the values of factors per rank."""
        return self.inputs + self.outputs


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """The sizes of `count` adapters, and of the products that they change."""

    count: int
    products: tuple[ChangedProduct, ...]

    @property
    def values(self) -> int:
        """Return the number of values of all factors."""
        return sum(product.width * sum(product.ranks) for product in self.products)

    @property
    def place_values(self) -> int:
        """Return the number of values of a place on a GPU, which fits any of the adapters."""
        return sum(product.width * max(MIN_RANK, *product.ranks) for product in self.products)

    def places(self, room: int, itemsize: int) -> int | None:
        """Return the number of places on a GPU; None if all adapters fit.

        Args:
            room: Bytes for adapters.
            itemsize: Bytes of a value.
        """
        found = max(MIN_PLACES, room // max(1, self.place_values * itemsize) - 1)  # one place has zeros
        return found if found < self.count else None

    def mean_cost(self, itemsize: int, tokens: int, adapters: int) -> Cost:
        """Return the cost of tokens with an adapter, and of adapters in a step, for the mean adapter."""
        costs = (
            low_rank_cost(tokens, adapters, product.inputs, product.outputs, rank, itemsize)
            for product in self.products
            for rank in product.ranks
        )
        whole = sum(costs, Cost())
        return Cost(whole.flops // self.count, whole.bytes // self.count)

    def with_cost(self, cost: ModelCost) -> ModelCost:
        """Return the cost of a model, with these adapters added."""
        size = cost.itemsize
        own = OperatorCost("adapters", adapted=self.mean_cost(size, 1, 0), adapter=self.mean_cost(size, 0, 1))
        return replace(cost, operators=(*cost.operators, own), adapted=True)


def adapter_sizes(spec: ModelSpec, adapters: Sequence[StoredAdapter]) -> AdapterSizes | None:
    """Return the sizes of the adapters that are not merged into the weights; None if there are none."""
    separate = [adapter for adapter in adapters if not adapter.config.dora]
    return AdapterSizes(len(separate), tuple(_products(spec, separate))) if separate else None


def _products(spec: ModelSpec, adapters: Sequence[StoredAdapter]) -> Iterator[ChangedProduct]:
    for index, layer in enumerate(spec.layers):
        for linear in layer.linears:
            found = (adapter.changed.get((index, linear.name), ()) for adapter in adapters)
            ranks = tuple(sum(module.rank for module in modules) for modules in found if modules)
            if ranks:
                yield ChangedProduct(linear.inputs, linear.outputs, ranks)
