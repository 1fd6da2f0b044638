"""The base of what is known of heads before anything of them is loaded. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

from batchinfer.core.errors import JobFileError, Mistake
from batchinfer.models.files.safetensors_header import TensorInfo
from batchinfer.models.files.weight_files import FLOAT_DTYPES
from batchinfer.models.spec.parameters import Shape
from batchinfer.models.spec.spec import ModelSpec
from batchinfer_kernels.cost import ModelCost

WHERE = "drafts.heads"
CONFIG = "config.json"


class StoredHeads(ABC):
    """Heads that passed every check: they fit their model."""

    @property
    @abstractmethod
    def files(self) -> tuple[Path, ...]:
        """The files of their weights."""

    @abstractmethod
    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of their weights once they are loaded, in values of that many bytes."""

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes that they keep of each token in the blocks of the KV cache."""
        return 0

    def state_bytes(self, rows: int, itemsize: int) -> int:
        """Return the bytes of the states of so many sampled rows, if they are asked with these."""
        return 0


class StoredLayer(StoredHeads):
    """A head with a layer of its own, which attends to what it kept of earlier tokens. It reads, of each token, a state
    that is made of its model's hidden states."""

    @property
    @abstractmethod
    def spec(self) -> ModelSpec:
        """A model of that one layer, whose tokens are those that the head proposes."""

    @property
    @abstractmethod
    def tapped(self) -> tuple[int, ...]:
        """The layers of its model whose inputs are read, ascending; the number of all layers: what the last one
        gives."""

    @abstractmethod
    def cost(self, itemsize: int) -> ModelCost:
        """Return the cost of its steps."""

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes of a token's K and V, and of its state."""
        return self.cost(itemsize).kv_bytes(1) + self.spec.hidden * itemsize


def heads_error(path: Path, *messages: str) -> JobFileError:
    """Make the error of heads that cannot be run."""
    return JobFileError(str(path), [Mistake(WHERE, message) for message in messages])


def tensor_mistakes(
    expected: Mapping[str, Shape], tensors: Mapping[str, TensorInfo], where: str, kind: str
) -> Iterator[str]:
    """Yield what is missing, has another shape than the model asks for, is stored as no floats, or is unknown. `where`
    they are stored, and which `kind` of heads these are."""
    for name, shape in expected.items():
        info = tensors.get(name)
        if info is None:
            yield f"{where} lacks the tensor {name}"
        elif info.shape != shape:
            yield f"{where}: {name} is of shape {info.shape}, and the model's heads are of {shape}"
        elif info.dtype not in FLOAT_DTYPES:
            yield f"{where}: {name} is stored as {info.dtype}; floating-point numbers are needed"
    for name in sorted(tensors.keys() - expected.keys()):
        yield f"{where} has the tensor {name}, which no {kind} has"
