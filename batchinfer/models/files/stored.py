"""What is known of a checkpoint that can be run, whoever's code computes it. No torch."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Protocol

from batchinfer.models.files.fingerprint import Progress
from batchinfer_kernels.arithmetic import Dtype, KvCacheDtype
from batchinfer_kernels.cost import ModelCost


class Description(Protocol):
    """What a model is, as far as everybody but its own code needs it. ModelSpec and ForeignSpec are descriptions."""

    @property
    def family(self) -> str:
        """`model_type` of its config.json."""

    @property
    def vocab(self) -> int:
        """How many token ids it knows."""

    @property
    def max_positions(self) -> int:
        """The longest context that it was made for."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""


class StoredModel(Protocol):
    """A checkpoint folder that passed every check."""

    @property
    def path(self) -> Path:
        """The folder."""

    @property
    def spec(self) -> Description:
        """What it holds."""

    @property
    def dtype(self) -> Dtype:
        """As config.json states it; else that of most of the stored bytes."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""

    @property
    def modelling(self) -> str:
        """Whose code computes the model, for the key of its answers: OWN, or a library and its version."""

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know before it runs."""

    @property
    def stores_codes(self) -> bool:
        """Whether products can be computed of codes of fp8 as they are stored."""

    def as_stored(self) -> StoredModel:
        """The same with weights that stay in codes where they can."""

    def refusals(self, quantized: bool, deterministic: bool, coded_cache: bool) -> list[tuple[str, str]]:
        """What is asked for and cannot be had of this model, whatever the device: key of the job file, and why."""

    def cost(self, itemsize: int, weight_itemsize: int, kv_cache: KvCacheDtype = "auto") -> ModelCost:
        """`itemsize`: bytes of an activation, and of a cached value where `kv_cache` keeps values; `weight_itemsize`:
        of a weight; 1: int8."""

    def fingerprint(self, cache: MutableMapping[str, str], progress: Progress = ...) -> str:
        """sha256 in hex of what the model computes; see WeightFiles."""
