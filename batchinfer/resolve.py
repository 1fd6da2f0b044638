"""What the job's `auto` means here: device, dtype, lengths; and the digest of all that decides an answer. No torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

from batchinfer.engine.config import NUMERICS_VERSION, Dtype, EngineConfig
from batchinfer.errors import JobFileError, Mistake
from batchinfer.job import Job
from batchinfer.models.checkpoint import Checkpoint
from batchinfer.report.hardware import Hardware, detect, has_fast_bf16, nvidia_gpus

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where and how a job runs."""

    device: Device
    dtype: Dtype
    max_model_len: int
    hardware: Hardware

    def context(self, checkpoint: Checkpoint, model_fingerprint: str, tokenizer_fingerprint: str) -> bytes:
        """sha256 over everything but the row itself that can change an answer; the first part of every work key."""
        parts = {
            "task": "generate",
            "model": model_fingerprint,
            "tokenizer": tokenizer_fingerprint,
            "dtype": self.dtype,
            "quantization": "none",
            "max_model_len": self.max_model_len,
            "eos": sorted(checkpoint.config.eos_token_ids),
            "numerics": NUMERICS_VERSION,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()

    def engine_config(self, job: Job, longest: int) -> EngineConfig:
        """`longest`: tokens, prompt and output, of the longest sequence that is to run."""
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
            peaks=self.hardware.peaks(self.dtype),
        )


def resolve(job: Job, checkpoint: Checkpoint) -> Setting:
    """Raises JobFileError for a max_model_len that the model was not made for."""
    device = job.engine.device if job.engine.device != "auto" else _device()
    positions = checkpoint.config.max_positions
    asked = job.model.max_model_len
    if asked is not None and asked > positions:
        text = (
            f"{asked} is more than the {positions} positions that the checkpoint was made for; leave it out"
        )
        raise JobFileError(str(job.source), [Mistake("model.max_model_len", text)])
    dtype = (
        job.model.dtype
        if job.model.dtype != "auto"
        else auto_dtype(device, checkpoint.dtype, has_fast_bf16())
    )
    return Setting(device, dtype, asked or positions, detect(device))


def auto_dtype(device: Device, stored: Dtype, fast_bf16: bool) -> Dtype:
    """As the checkpoint is stored, where the device is fast in it; a CPU without fast bfloat16 runs float32."""
    if device == "cuda" or stored == "float32":
        return stored
    return "bfloat16" if fast_bf16 else "float32"


def _device() -> Device:
    """A GPU counts only with a torch that can use it; its CPU build says so in its version."""
    can = not version("torch").endswith("+cpu")
    return "cuda" if can and nvidia_gpus() else "cpu"


def _chosen(value: int | Literal["auto"]) -> int | None:
    return None if value == "auto" else value
