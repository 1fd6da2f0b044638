"""What the job's `auto` means here: device, dtype, lengths; and the digest of all that decides an answer. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

from batchinfer.engine.config import NUMERICS_VERSION, EngineConfig
from batchinfer.errors import JobFileError, Mistake
from batchinfer.job import Job
from batchinfer.models.checkpoint import OWN
from batchinfer.models.stored import StoredModel
from batchinfer.report.hardware import Hardware, detect, has_fast_bf16, nvidia_gpus
from batchinfer_kernels.arithmetic import Device, Dtype, Quantization
from batchinfer_kernels.cost import ModelCost, Peaks
from batchinfer_kernels.tiles import tile_grant

# What the context of a work key says by leaving it out. These never change: a stored key would mean another value.
_ABSENT: Mapping[str, Any] = {
    "quantization": "none",
    "deterministic": False,
    "block_size": "auto",
    "device": "cpu",
    "tiles": False,
    "modelling": OWN,
    "columns": 0,
}


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how a job runs."""

    device: Device
    dtype: Dtype
    max_model_len: int
    hardware: Hardware
    quantization: Quantization = "none"
    deterministic: bool = False
    block_size: int | Literal["auto"] = "auto"
    tiles: bool = False  # whether this CPU grants its matrix tiles

    @property
    def arithmetic(self) -> str:
        """What is computed in, for people: `bfloat16 with int8 weights, deterministic`."""
        weights = f" with {self.quantization} weights" if self.quantization != "none" else ""
        return self.dtype + weights + (", deterministic" if self.deterministic else "")

    @property
    def peaks(self) -> Peaks | None:
        """What the hardware reaches in this arithmetic; None where that is not known."""
        return self.hardware.peaks(self.dtype, self.quantization)

    def model_cost(self, checkpoint: StoredModel) -> ModelCost:
        """What steps of the model cost as it will lie in memory."""
        itemsize = 4 if self.dtype == "float32" else 2
        return checkpoint.cost(itemsize, 1 if self.quantization == "int8" else itemsize)

    def context(
        self, checkpoint: StoredModel, model_fingerprint: str, tokenizer_fingerprint: str, columns: int = 0
    ) -> bytes:
        """sha256 over everything but the row itself that can change an answer; the first part of every work key.

        An option at its default is absent, so that one which is added later throws no stored answer away. `columns`:
        the version of the rules by which answers are checked against typed columns; 0: they have none. An answer
        that another job stored unchecked could not be published, and one that is refused is an answer elsewhere.
        """
        parts = {
            "model": model_fingerprint,
            "tokenizer": tokenizer_fingerprint,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "eos": sorted(checkpoint.spec.eos_token_ids),
            "numerics": NUMERICS_VERSION,
        }
        options = {**self._options(), "modelling": checkpoint.modelling, "columns": columns}
        parts |= {name: value for name, value in options.items() if value != _ABSENT[name]}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()

    def _options(self) -> dict[str, Any]:
        """What can change an answer and has a default. Blocks, a device's operators and matrix tiles decide in what
        order is added, which counts only where the bits are promised."""
        options: dict[str, Any] = {
            "quantization": self.quantization,
            "deterministic": self.deterministic,
        }
        if self.deterministic:
            options |= {"block_size": self.block_size, "device": self.device}
            options["tiles"] = (
                self.tiles and self.dtype == "bfloat16"
            )  # in float32 all sums are those of vectors
        return options

    def engine_config(self, job: Job, longest: int, logprobs: int | None = None) -> EngineConfig:
        """`longest`: tokens, prompt and output, of the longest sequence that is to run; `logprobs`: the most that one
        of them asks for."""
        engine = job.engine
        return EngineConfig(
            model=job.model.path,
            dtype=self.dtype,
            device=self.device,
            max_model_len=self.max_model_len,
            longest=longest,
            max_num_seqs=_chosen(engine.max_num_seqs),
            max_num_batched_tokens=_chosen(engine.max_num_batched_tokens),
            block_size=_chosen(engine.block_size),
            kv_memory=None if engine.kv_memory == "auto" else engine.kv_memory,
            prefix_caching=engine.enable_prefix_caching,
            threads=_chosen(engine.threads),
            peaks=self.peaks,
            quantization=self.quantization,
            deterministic=self.deterministic,
            tiles=self.tiles,
            logprobs=logprobs,
        )


def resolve(job: Job, checkpoint: StoredModel, hardware: Hardware | None = None) -> Setting:
    """`hardware`: a machine other than this one, as if the job ran there.

    Raises JobFileError for a max_model_len that the model was not made for, and for what the device cannot do.
    """
    device: Device
    if hardware is not None:
        device = hardware.device
    else:
        device = job.engine.device if job.engine.device != "auto" else _device()
    dtype = (
        job.model.dtype
        if job.model.dtype != "auto"
        else auto_dtype(device, checkpoint.dtype, has_fast_bf16())
    )
    positions = checkpoint.spec.max_positions
    refused = checkpoint.refusals(job.model.quantization != "none", job.engine.deterministic)
    mistakes = [*_too_long(job.model.max_model_len, positions), *_not_on(device, dtype, job)]
    mistakes += [Mistake(key, text) for key, text in refused]
    if mistakes:
        raise JobFileError(str(job.source), mistakes)
    length = job.model.max_model_len or positions
    chosen = job.model.quantization, job.engine.deterministic, job.engine.block_size
    return Setting(device, dtype, length, hardware or detect(device), *chosen, runs_in_tiles(device))


def _too_long(asked: int | None, positions: int) -> Iterator[Mistake]:
    if asked is not None and asked > positions:
        text = (
            f"{asked} is more than the {positions} positions that the checkpoint was made for; leave it out"
        )
        yield Mistake("model.max_model_len", text)


def _not_on(device: Device, dtype: Dtype, job: Job) -> Iterator[Mistake]:
    """A CPU that the job names was refused with the job file; here it is one that `auto` has found."""
    if device == "cpu" and dtype == "float16":
        text = "not available in float16 on a CPU, which device: auto means here; take dtype: bfloat16 or float32"
        if job.model.quantization != "none":
            yield Mistake("model.quantization", f"{job.model.quantization} is {text}, or leave it out")
        if job.engine.deterministic:
            yield Mistake("engine.deterministic", f"true is {text}, or leave it out")


def auto_dtype(device: Device, stored: Dtype, fast_bf16: bool) -> Dtype:
    """As the checkpoint is stored, where the device is fast in it; a CPU without fast bfloat16 runs float32."""
    if device == "cuda" or stored == "float32":
        return stored
    return "bfloat16" if fast_bf16 else "float32"


def runs_in_tiles(device: Device) -> bool:
    """Whether the operators will compute in the CPU's matrix tiles: where the system grants them."""
    return device == "cpu" and tile_grant().given


def _device() -> Device:
    """A GPU counts only with a torch that can use it; its CPU build says so in its version."""
    can = not version("torch").endswith("+cpu")
    return "cuda" if can and nvidia_gpus() else "cpu"


def _chosen(value: int | Literal["auto"]) -> int | None:
    return None if value == "auto" else value
