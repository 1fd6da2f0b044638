"""Parts of a layer whose results are sums over ranks, each of which has some of the inputs."""

from __future__ import annotations

from torch import Tensor

from batchinfer.models.ops.interface import AddedValues, Experts, Linear
from batchinfer.models.parallel.group import Group
from batchinfer.models.spec.spec import SHARED
from batchinfer_kernels.experts import Choice

# The products that read what ranks have a part of
SUMMED = ("o", "down", SHARED + "down")


class SummedLinear(Linear):
    """A product of the rank's inputs, added up over all ranks."""

    def __init__(self, inner: Linear, group: Group) -> None:
        self.in_features, self.out_features = inner.in_features, inner.out_features
        self._inner, self._group = inner, group

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self._inner(x))

    def adapted(self, x: Tensor, added: AddedValues) -> Tensor:
        return self._group.all_reduce(self._inner.adapted(x, added))


class SummedExperts(Experts):
    """Experts of which the rank has some columns each, added up over all ranks."""

    def __init__(self, inner: Experts, group: Group) -> None:
        self.loads = inner.loads
        self._inner, self._group = inner, group

    def __call__(self, x: Tensor, choice: Choice, counted: Tensor | None = None) -> Tensor:
        return self._group.all_reduce(self._inner(x, choice, counted))
