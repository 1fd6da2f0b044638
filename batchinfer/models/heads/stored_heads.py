"""The base classes of draft heads that are checked but not loaded. No torch."""

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
    """A folder of draft heads that was checked to fit their target model, but is not loaded."""

    @property
    @abstractmethod
    def files(self) -> tuple[Path, ...]:
        """Return the files of the heads' weights."""

    @abstractmethod
    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of the heads' loaded weights.

        Args:
            itemsize: Bytes of a value.
        """

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes that the heads add to the KV cache per token. The default is 0: they have no KV cache.

        Args:
            itemsize: Bytes of a value.
        """
        return 0

    def state_bytes(self, rows: int, itemsize: int) -> int:
        """Return the bytes of the target model's hidden states that are kept for the heads. The default is 0: none.

        Args:
            rows: The number of kept hidden states, one per sampled row.
            itemsize: Bytes of a value.
        """
        return 0


class StoredLayer(StoredHeads):
    """The folder of a draft head with a decoder layer (EAGLE or MTP) and its own KV cache, checked but not loaded.

    In addition to K and V, the cache stores the head's state of each token (see `LayerHead`).
    """

    @property
    @abstractmethod
    def spec(self) -> ModelSpec:
        """Return the draft head as the spec of a model with one layer.

        Its vocabulary has the tokens that the head can propose.
        """

    @property
    @abstractmethod
    def tapped(self) -> tuple[int, ...]:
        """Return the numbers of the target model's layers whose inputs the head reads, ascending.

        The number of layers itself means the output of the last layer.
        """

    @abstractmethod
    def cost(self, itemsize: int) -> ModelCost:
        """Return the FLOPs and memory traffic of the draft head's operators, per step, token and sampled row.

        Args:
            itemsize: Bytes of a value.
        """

    def token_bytes(self, itemsize: int) -> int:
        """Return the bytes that the head adds to the KV cache per token: K, V and the head's state of the token."""
        return self.cost(itemsize).kv_bytes(1) + self.spec.hidden * itemsize


def heads_error(path: Path, *messages: str) -> JobFileError:
    """Return the error for draft heads that cannot be used. Its messages refer to the key drafts.heads of the job file.

    Args:
        path: The folder of the heads.
        messages: The errors.
    """
    return JobFileError(str(path), [Mistake(WHERE, message) for message in messages])


def tensor_mistakes(
    expected: Mapping[str, Shape], tensors: Mapping[str, TensorInfo], where: str, kind: str
) -> Iterator[str]:
    """Yield an error message for each tensor that is missing, unknown, of a wrong shape, or not floating-point.

    Args:
        expected: The expected shape of each tensor by name.
        tensors: The stored tensors by name.
        where: The name of the file, for messages.
        kind: The kind of draft heads, such as "Medusa head", for messages.
    """
    for name, shape in expected.items():
        info = tensors.get(name)
        if info is None:
            yield f"{where} has no tensor {name}"
        elif info.shape != shape:
            yield f"{where}: {name} is of shape {info.shape}, and the model's heads are of {shape}"
        elif info.dtype not in FLOAT_DTYPES:
            yield f"{where}: {name} is stored as {info.dtype}; floating-point numbers are needed"
    for name in sorted(tensors.keys() - expected.keys()):
        yield f"{where} has the tensor {name}, which no {kind} has"
