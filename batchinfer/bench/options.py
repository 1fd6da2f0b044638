"""The options of `batchinfer bench`, which are checked together before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from batchinfer.bench.workloads import WORKLOADS
from batchinfer.core.errors import UsageError
from batchinfer.core.hub import NoModel, locate_model
from batchinfer.models.checkpoint.shapes import SHAPES
from batchinfer_kernels.arithmetic import CacheDtype, Dtype, RequestedQuantization

DEFAULT_WORKLOADS = ("shared-prefix", "mixed", "decode")
DEFAULT_MODEL = "llama-135m"
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", *get_args(CacheDtype))
PEERS = ("transformers",)
QUANTIZATIONS = get_args(RequestedQuantization)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The options of `batchinfer bench`.

    Attributes:
        workloads: Names of the workloads to run.
        model: A named model shape (which gets dummy weights), a checkpoint folder, or a name in the Hugging Face cache.
        dtype: Dtype of the run, or "auto".
        quantization: Quantisation of the linear layers, or "auto".
        kv_cache_dtype: Format of the KV cache; "auto": not quantised.
        deterministic: True if a row's answer must not depend on other rows.
        device: "cpu", "cuda" or "auto".
        threads: Number of CPU threads; None: all cores.
        max_num_seqs: Maximum number of sequences that run at a time; None: the engine chooses.
        max_num_batched_tokens: Maximum number of tokens per step; None: the engine chooses.
        rows: Number of rows of each workload; None: its default.
        max_tokens: Maximum number of output tokens per row; None: no limit.
        schemas: For each number, runs with this number of different JSON Schemas are added.
        drafts: True to add runs with draft tokens.
        repeat: Number of runs of each workload.
        against: Name of another engine to compare with, or None.
        export: File to export a workload to instead of a run, or None.
    """

    workloads: tuple[str, ...] = DEFAULT_WORKLOADS
    model: str = DEFAULT_MODEL
    dtype: str = "auto"
    quantization: str = "auto"
    kv_cache_dtype: str = "auto"
    deterministic: bool = False
    device: str = "auto"
    threads: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    rows: int | None = None
    max_tokens: int | None = None
    schemas: tuple[int, ...] = ()
    drafts: bool = False
    repeat: int = 3
    against: str | None = None
    export: Path | None = None

    def check(self) -> None:
        """Raise UsageError if options are wrong. The message has all wrong values, and the possible values."""
        wrong = [*self._unknown_names(), *self._too_small()]
        if self.export is not None and len(self.workloads) != 1:
            wrong.append(f"--export writes one workload; {len(self.workloads)} are named, name one")
        if self.export is not None and self.schemas:
            wrong.append("--export writes rows without schemas; leave out --schemas")
        if wrong:
            raise UsageError("\n".join(wrong))

    def _unknown_names(self) -> list[str]:
        known = [
            *(("WORKLOAD", name, tuple(WORKLOADS)) for name in self.workloads),
            ("--dtype", self.dtype, ("auto", *get_args(Dtype))),
            ("--quantization", self.quantization, QUANTIZATIONS),
            ("--kv-cache-dtype", self.kv_cache_dtype, KV_CACHE_DTYPES),
            ("--device", self.device, DEVICES),
            ("--against", self.against, (None, *PEERS)),
        ]
        found = [
            f"{what} is {value!r}; it can be {', '.join(filter(None, names))}"
            for what, value, names in known
            if value not in names
        ]
        if not self.is_shape:
            found += self._unknown_model()
        return found

    def _unknown_model(self) -> list[str]:
        try:
            locate_model(self.model, Path(self.model))
        except NoModel as error:
            return [
                f"--model is {self.model!r}; it can be {', '.join(SHAPES)}, a checkpoint folder, or org/name in the "
                f"Hugging Face cache: {error} ({error.hint})"
            ]
        return []

    @property
    def folder(self) -> Path:
        """Return the folder of the model's checkpoint. If the model is a named shape, the path does not exist."""
        return Path(self.model) if self.is_shape else locate_model(self.model, Path(self.model))

    def _too_small(self) -> list[str]:
        numbers = {
            "--threads": self.threads,
            "--max-num-seqs": self.max_num_seqs,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--rows": self.rows,
            "--max-tokens": self.max_tokens,
            "--schemas": min(self.schemas, default=None),
            "--repeat": self.repeat,
        }
        return [
            f"{name} is {value}; at least 1 is needed"
            for name, value in numbers.items()
            if value is not None and value < 1
        ]

    @property
    def is_shape(self) -> bool:
        """Return True if the model is a named shape, which runs with dummy weights."""
        return self.model in SHAPES
