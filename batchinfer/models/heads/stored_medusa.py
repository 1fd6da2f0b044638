"""The folder of Medusa heads (Cai et al., 2024, arXiv:2401.10774), checked against their model.

No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.files.config_fields import Fields, load_json_object
from batchinfer.models.files.folder import CheckpointFolder
from batchinfer.models.files.safetensors_header import read_header
from batchinfer.models.files.weight_files import NAMED
from batchinfer.models.heads.stored_heads import CONFIG, StoredHeads, heads_error, tensor_mistakes

WEIGHTS, PICKLED = "medusa_lm_head.safetensors", "medusa_lm_head.pt"
MAX_HEADS, MAX_LAYERS = 16, 8
_HEAD = re.compile(r"(\d+)\.")


@dataclass(frozen=True, slots=True)
class StoredMedusa(StoredHeads):
    """The folder of Medusa draft heads, checked to fit their target model but not loaded.

    Args:
        weights: The file of the heads' weights.
        count: The number of heads.
        layers: The number of residual blocks per head.
        hidden: The hidden size of the target model.
        vocab: The vocabulary size of the target model.
    """

    weights: Path
    count: int
    layers: int
    hidden: int
    vocab: int

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the file of the heads' weights."""
        return (self.weights,)

    @property
    def head_values(self) -> int:
        """Return the number of weight values of one head."""
        return self.layers * self.hidden * (self.hidden + 1) + self.vocab * self.hidden

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of all heads' loaded weights, with `itemsize` bytes per value."""
        return self.count * self.head_values * itemsize

    def state_bytes(self, rows: int, itemsize: int) -> int:
        """Return the bytes of the target model's hidden states that are kept for the heads.

        Args:
            rows: The number of kept hidden states, one per sampled row.
            itemsize: Bytes of a value.
        """
        return rows * self.hidden * itemsize

    def names(self, head: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield (name, shape) of each tensor of one head.

        Args:
            head: The number of the head, from 0.
        """
        hidden = self.hidden
        for layer in range(self.layers):
            yield f"{head}.{layer}.linear.weight", (hidden, hidden)
            yield f"{head}.{layer}.linear.bias", (hidden,)
        yield f"{head}.{self.layers}.weight", (self.vocab, hidden)


def inspect_medusa(folder: CheckpointFolder, checkpoint: Checkpoint) -> StoredMedusa:
    """Check that a folder of Medusa heads is complete and fits a target model, without loading the weights.

    Args:
        folder: The folder.
        checkpoint: The target model.

    Raises:
        JobFileError: Something is missing, or does not fit the model.
        SecurityRefusal: A path leaves the folder, or a file is malformed.
    """
    path, config, weights = folder.path, folder.file(CONFIG), folder.file(WEIGHTS)
    if config is None or weights is None:
        missing = CONFIG if config is None else WEIGHTS
        pickled = weights is None and folder.file(PICKLED) is not None
        hint = f"; {PICKLED} is a pickle, which is not read: save its tensors as {WEIGHTS}" if pickled else ""
        raise heads_error(path, f"{path} has no {missing}: a folder of Medusa heads is needed{hint}")
    mistakes = list[str]()
    fields = Fields(load_json_object(config), CONFIG, mistakes)
    least = fields.integer("medusa_num_heads", high=MAX_HEADS)
    layers = fields.integer("medusa_num_layers", high=MAX_LAYERS)
    if mistakes:
        raise heads_error(path, *mistakes)
    tensors, spec = read_header(weights), checkpoint.spec
    # Published configurations of five heads state two
    count = max((int(found[1]) + 1 for name in tensors if (found := _HEAD.match(name))), default=0)
    heads = StoredMedusa(weights, min(count, MAX_HEADS), layers, spec.hidden, spec.vocab)
    expected = dict(pair for head in range(max(1, heads.count)) for pair in heads.names(head))
    mistakes += tensor_mistakes(expected, tensors, WEIGHTS, "Medusa head")
    if not mistakes and count < least:
        mistakes.append(f"{WEIGHTS} has {count} heads, and {CONFIG} says {least}")
    if mistakes:
        raise heads_error(path, *mistakes[:NAMED])
    return heads
