"""The memory of a job's adapters, and their cost per step. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from batchinfer.models.adapters.stored_adapter import StoredAdapter
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.cost import Cost, ModelCost, OperatorCost, low_rank_cost

MIN_RANK = 16  # of an adapter slot on a GPU: the smallest inner dimension of a tile
# Adapter slots on a GPU, whatever their size: with fewer, rows would often wait for a slot for their adapter
MIN_SLOTS = 8


@dataclass(frozen=True, slots=True)
class ChangedProduct:
    """A matrix product of a layer that a job's adapters change.

    Args:
        inputs: Number of inputs of the product per token.
        outputs: Number of outputs of the product per token.
        ranks: The ranks of the adapters that change the product.
    """

    inputs: int
    outputs: int
    ranks: tuple[int, ...]

    @property
    def width(self) -> int:
        """Return the number of values in the LoRA matrices A and B of this product for an adapter of rank 1."""
        return self.inputs + self.outputs


@dataclass(frozen=True, slots=True)
class AdapterSizes:
    """The sizes of a job's LoRA adapters, to predict their memory and cost.

    DoRAs are left out, because they are merged into the model's weights.

    Args:
        count: The number of adapters.
        products: The matrix products of all layers that at least one adapter changes.
    """

    count: int
    products: tuple[ChangedProduct, ...]

    @property
    def values(self) -> int:
        """Return the number of values in the LoRA matrices A and B of all adapters together."""
        return sum(product.width * sum(product.ranks) for product in self.products)

    @property
    def slot_values(self) -> int:
        """Return the number of values in one adapter slot on a GPU. Each slot has room for any adapter of the job."""
        return sum(product.width * max(MIN_RANK, *product.ranks) for product in self.products)

    def slots(self, room: int, itemsize: int) -> int | None:
        """Return the number of adapters that a GPU can hold at a time, at least MIN_SLOTS.

        Returns None if it can hold all adapters of the job.

        Args:
            room: Bytes of GPU memory for adapters.
            itemsize: Bytes of a value.
        """
        found = max(MIN_SLOTS, room // max(1, self.slot_values * itemsize) - 1)  # one more slot has zeros
        return found if found < self.count else None

    def mean_cost(self, itemsize: int, tokens: int, adapters: int) -> Cost:
        """Return the FLOPs and bytes that LoRA adds to a step, for adapters of mean size.

        Args:
            itemsize: Bytes of a value.
            tokens: Number of the step's tokens that use an adapter.
            adapters: Number of different adapters that they use.
        """
        costs = (
            low_rank_cost(tokens, adapters, product.inputs, product.outputs, rank, itemsize)
            for product in self.products
            for rank in product.ranks
        )
        whole = sum(costs, Cost())
        return Cost(whole.flops // self.count, whole.bytes // self.count)

    def with_cost(self, cost: ModelCost) -> ModelCost:
        """Return a copy of a model's cost with one more operator, "adapters", which is the cost of LoRA."""
        size = cost.itemsize
        own = OperatorCost("adapters", adapted=self.mean_cost(size, 1, 0), adapter=self.mean_cost(size, 0, 1))
        return replace(cost, operators=(*cost.operators, own), adapted=True)


def adapter_sizes(spec: ModelSpec, adapters: Sequence[StoredAdapter]) -> AdapterSizes | None:
    """Return the sizes of a job's LoRA adapters; None if there are none.

    DoRAs are skipped, as they are merged into the weights.
    """
    separate = [adapter for adapter in adapters if not adapter.config.dora]
    return AdapterSizes(len(separate), tuple(_products(spec, separate))) if separate else None


def _products(spec: ModelSpec, adapters: Sequence[StoredAdapter]) -> Iterator[ChangedProduct]:
    for index, layer in enumerate(spec.layers):
        for linear in layer.linears:
            found = (adapter.changed.get((index, linear.name), ()) for adapter in adapters)
            ranks = tuple(sum(module.rank for module in modules) for modules in found if modules)
            if ranks:
                yield ChangedProduct(linear.inputs, linear.outputs, ranks)
