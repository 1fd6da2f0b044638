"""A job's `auto` is resolved for this machine: device, dtype, lengths; and the digest of all that decides an answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from batchinfer.core.errors import CannotSplit, JobFileError, Mistake, Unavailable
from batchinfer.core.samples import DraftName
from batchinfer.engine.config import NUMERICS_VERSION, BesideConfig, EngineConfig, LoadConfig
from batchinfer.engine.ranks.parts import check_division
from batchinfer.engine.ranks.seat import UNDIVIDED, Division
from batchinfer.job import Job
from batchinfer.job.field_types import AUTO_DRAFTS
from batchinfer.job.spec import DraftModelSection
from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.hardware import (
    Hardware,
    arithmetic_text,
    arm_sums,
    detect,
    has_fast_bf16,
    multiplies_fp8,
    nvidia_gpus,
    several_kinds,
    usable_gpus,
)
from batchinfer.machine.memory import available_memory
from batchinfer.models.adapters.sizes import AdapterSizes
from batchinfer.models.checkpoint.checkpoint import OWN, Checkpoint
from batchinfer.models.heads.stored_heads import StoredHeads
from batchinfer.models.opening import StoredModel
from batchinfer.plan.expert_plan import ExpertPlan
from batchinfer.plan.setup.job_pairs import pair_mistakes
from batchinfer_kernels.arithmetic import AskedQuantization, Device, Dtype, KvCacheDtype, Quantization
from batchinfer_kernels.cost import ModelCost, Peaks
from batchinfer_kernels.tiles import tile_grant

# What the context of a work key says by leaving it out. These never change: a stored key would mean another value.
_ABSENT: Mapping[str, Any] = {
    "quantization": "none",
    "deterministic": False,
    "kv_cache_dtype": "auto",
    "block_size": "auto",
    "device": "cpu",
    "tiles": False,
    "arm": "",
    "integer_codes": False,
    "smoothed": False,
    "calibrated": False,
    "wide_activations": False,
    "coded_tiles": False,
    "int4_experts": False,
    "modelling": OWN,
    "columns": 0,
    "output": "tokens",
}

# Of a GPU's memory, for adapters, beside the cache: with rank 16 on all modules of an 8B model some 60 of an H100
ADAPTERS_SHARE = 0.1
_SAME_VALUES = ("stored-mxfp4", "stored-sparse")  # as once they are dequantised, or filled up


@dataclass(frozen=True, slots=True)
class Setting:
    """A job's setting says where and how it runs."""

    device: Device
    dtype: Dtype
    max_model_len: int
    hardware: Hardware
    quantization: Quantization = "none"
    deterministic: bool = False
    block_size: int | Literal["auto"] = "auto"
    tiles: bool = False  # whether this CPU grants its matrix tiles
    replicas: int = 1  # engines that share the work
    division: Division = UNDIVIDED  # of the ranks of each
    machines: int = 1  # that engines run on, this one and its nodes: as many on each, or one engine on all
    gpus: tuple[
        str, ...
    ] = ()  # one for each of several ranks of all engines of this machine, as CUDA_VISIBLE_DEVICES names them
    arm: str = ""  # how an Arm CPU adds up; empty elsewhere
    kv_cache: KvCacheDtype = "auto"
    shares_prefixes: bool = True  # prompts may begin with what the cache has of others
    calibrates: bool = False  # whether weights become int4 by a calibration
    weights: Path | None = None  # the checkpoint that it has made; None: there is none, or it has none yet
    # bytes of this machine's memory that were free before any engine was started; None: a machine elsewhere
    free_memory: int | None = None
    adapters: tuple[tuple[str, Path], ...] = ()  # the fingerprints of adapters, and their folders
    adapter_sizes: AdapterSizes | None = None  # of those that stand beside the weights
    beside: BesideConfig | None = (
        None  # a draft model that engines have beside the job's; None: there is none
    )
    heads: StoredHeads | None = None  # of the job's model, which propose tokens; None: there are none
    experts: ExpertPlan | None = None  # which whole experts ranks have; None: these are not divided

    def for_rows(self, rows: int) -> Setting:
        """Return the setting with no more engines than there are rows."""
        fewer = replace(self, replicas=max(1, min(self.replicas, rows)))
        ranks = fewer.processes_here
        return replace(fewer, gpus=self.gpus[:ranks] if ranks > 1 else ())

    @property
    def machines_used(self) -> int:
        """Count the machines that have an engine, or a part of one."""
        return max(self.division.machines, min(self.machines, self.replicas))

    @property
    def engines_here(self) -> int:
        """Count the engines of this machine, one of which may have ranks elsewhere."""
        return self.replicas if self.division.machines > 1 else -(-self.replicas // self.machines)

    @property
    def processes_here(self) -> int:
        """Count the ranks of all engines that run on this machine."""
        return self.engines_here * self.division.ranks_here

    def without_sharing(self) -> Setting:
        """Return the setting of a job whose prompts each run as a whole and share no prefix."""
        return replace(self, shares_prefixes=False)

    @property
    def arithmetic(self) -> str:
        """The arithmetic in words: `bfloat16 with int8 weights, deterministic`."""
        return arithmetic_text(self.dtype, self.quantization, self.kv_cache, self.deterministic)

    @property
    def facts(self) -> dict[str, Any]:
        """The setting in the columns of the run table, but for the hardware."""
        return {
            "dtype": self.dtype,
            "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache,
            "deterministic": self.deterministic,
            "replicas": self.replicas,
            "ranks": self.division.ranks,
            "machines": self.machines_used,
        }

    @property
    def peaks(self) -> Peaks | None:
        """The peaks of one engine's hardware in this arithmetic: of a GPU for each of its ranks, or of its part of a
        CPU; None where they are not known."""
        whole = self.hardware.peaks(self.dtype, self.quantization)
        if whole is None or (self.device == "cuda" and self.division.ranks == 1):
            return whole
        if self.device == "cuda":
            return whole.times(self.division.ranks)
        # nodes are taken to be as this machine is
        return whole.times(self.division.machines).part(self.engines_here)

    def model_cost(self, checkpoint: StoredModel) -> ModelCost:
        """Return what steps of the model cost, as it will lie in memory."""
        codes = self.quantization, self.kv_cache
        found = checkpoint.cost(self.itemsize, *codes, self.device, self.deterministic)
        return found if self.adapter_sizes is None else self.adapter_sizes.with_cost(found)

    @property
    def itemsize(self) -> int:
        """Return the bytes of a value that is not quantised."""
        return 4 if self.dtype == "float32" else 2

    @property
    def adapter_places(self) -> int | None:
        """Return how many adapters are on a GPU at a time; None: all."""
        sizes, memory = self.adapter_sizes, self.hardware.memory_bytes
        if sizes is None or self.device == "cpu" or memory is None:
            return None
        return sizes.places(int(memory * ADAPTERS_SHARE), self.itemsize)

    @property
    def adapter_bytes(self) -> int:
        """Return the bytes of the device that adapters take beside an engine's weights."""
        sizes, places = self.adapter_sizes, self.adapter_places
        if sizes is None:
            return 0
        if self.device == "cpu":
            return sizes.values * self.itemsize
        return sizes.place_values * ((sizes.count if places is None else places) + 1) * self.itemsize

    def context(
        self,
        checkpoint: StoredModel,
        model_fingerprint: str,
        tokenizer_fingerprint: str,
        columns: int = 0,
        output: str = "tokens",
    ) -> bytes:
        """sha256 over everything but the row itself that can change an answer; the first part of every work key.

        An option at its default is absent, so that one which is added later throws no stored answer away. `columns`:
        the version of the rules by which answers are checked against typed columns; 0: they have none. An answer
        that another job stored unchecked could not be published, and one that is refused is an answer elsewhere.
        `output`: the kind of answers.
        """
        parts = {
            "model": model_fingerprint,
            "tokenizer": tokenizer_fingerprint,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "eos": sorted(checkpoint.spec.eos_token_ids),
            "numerics": NUMERICS_VERSION,
        }
        options = {**self._options(), "modelling": checkpoint.modelling, "columns": columns, "output": output}
        # experts were in int8 once where the rest is in int4
        options["int4_experts"] = self.quantization == "int4" and _has_experts(checkpoint)
        parts |= {name: value for name, value in options.items() if value != _ABSENT[name]}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()

    def _options(self) -> dict[str, Any]:
        """Return the options that can change an answer and have a default. Blocks, a device's operators, matrix tiles
        and Arm's vectors decide the order of additions, which counts only where the bits are promised."""
        options: dict[str, Any] = {
            # what MXFP4 stands for is multiplied, to the bit, whether it is dequantised before or then; zeros change no
            # sum, whether they are added or not
            "quantization": "none" if self.quantization in _SAME_VALUES else self.quantization,
            "deterministic": self.deterministic,
            "kv_cache_dtype": self.kv_cache,
            "calibrated": self.calibrates,
            # a CPU quantises activations to int8 for weights in int4, a GPU does not
            "wide_activations": self.device == "cuda" and self.quantization in ("int4", "stored-int4"),
        }
        if self.deterministic:
            options |= {"block_size": self.block_size, "device": self.device}
            # in float32 all sums are those of vectors
            options["tiles"] = self.tiles and self.dtype == "bfloat16"
            options["arm"] = self.arm
            # outlier channels were rounded as they are once, and are made smaller now
            options["smoothed"] = self.quantization == "int8"
            # a GPU adds up what it widens in registers in tiles of other sizes
            options["coded_tiles"] = (self.device, self.quantization) == ("cuda", "stored-mxfp4")
            # a CPU widened the cache's codes to bfloat16 once, and multiplies them as integers now
            options["integer_codes"] = (self.device, self.kv_cache, self.dtype) == ("cpu", "int8", "bfloat16")
        return options

    def load_config(self, job: Job) -> LoadConfig:
        """Return how the first engine loads its weights."""
        threads, processes = _chosen(job.engine.threads), self.processes_here
        return LoadConfig(
            model=self.weights or job.model.path,
            dtype=self.dtype,
            device=self.device,
            threads=threads if processes == 1 else thread_shares(threads, processes)[0],
            quantization=self.quantization,
            deterministic=self.deterministic,
            tiles=self.tiles,
            kv_cache=self.kv_cache,
            adapters=self.adapters,
            adapter_places=self.adapter_places,
            beside=self.beside,
            heads=self._heads_folder(job),
            experts=None if self.experts is None else self.experts.placement,
        )

    def _heads_folder(self, job: Job) -> Path | None:
        drafts = job.drafts
        return drafts.heads if self.heads is not None and isinstance(drafts, DraftModelSection) else None

    def engine_config(self, job: Job, longest: int, logprobs: int | None = None) -> EngineConfig:
        """Return the configuration of the first engine.

        `longest`: tokens, prompt and output, of the longest sequence that is to run; `logprobs`: the most that one of
        the sequences asks for.
        """
        engine, shared = job.engine, self.engines_here > 1 and self.device == "cpu"
        kv_memory = None if engine.kv_memory == "auto" else engine.kv_memory
        return EngineConfig(
            self.load_config(job),
            max_model_len=self.max_model_len,
            longest=longest,
            max_num_seqs=_chosen(engine.max_num_seqs),
            max_num_batched_tokens=_chosen(engine.max_num_batched_tokens),
            block_size=_chosen(engine.block_size),
            kv_memory=kv_memory // self.engines_here if shared and isinstance(kv_memory, int) else kv_memory,
            prefix_caching=engine.enable_prefix_caching and self.shares_prefixes,
            memory=self.memory() // self.engines_here if shared else None,
            peaks=self.peaks,
            logprobs=logprobs,
            drafts=self.draft_sources(job),
        )

    def draft_sources(self, job: Job) -> tuple[DraftName, ...]:
        """Return where the engines' drafts come from."""
        return AUTO_DRAFTS if self.beside is not None else job.draft_sources

    def memory(self) -> int:
        """Return the bytes of memory that a CPU's engines may take, weights included."""
        return available_memory() if self.free_memory is None else self.free_memory


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
    if mistakes := list(_mistakes(job, checkpoint, device, dtype)):
        raise JobFileError(str(job.source), mistakes)
    place = hardware or detect(device)
    quantization = resolved_quantization(job.model.quantization, checkpoint, place, dtype, hardware is None)
    if quantization == "stored-sparse" and job.engine.deterministic:
        quantization = "none"  # cuSPARSELt promises no bits
    _refuse_division(job, checkpoint, device, quantization)
    replicas, gpus = _replicas(job, device, hardware is None)
    return Setting(
        device=device,
        dtype=dtype,
        max_model_len=job.model.max_model_len or checkpoint.spec.max_positions,
        hardware=place,
        quantization=quantization,
        deterministic=job.engine.deterministic,
        block_size=job.engine.block_size,
        tiles=runs_in_tiles(device),
        replicas=replicas,
        division=division_of(job),
        machines=job.engine.machines,
        gpus=gpus,
        arm=arm_sums(dtype) if device == "cpu" else "",
        kv_cache=job.model.kv_cache_dtype,
        free_memory=available_memory() if hardware is None else None,
    )


def _replicas(job: Job, device: Device, here: bool) -> tuple[int, tuple[str, ...]]:
    """How many engines share the work, and on which of this machine's GPUs; none are named for a single rank, or for a
    machine elsewhere.

    Raises JobFileError for more than this machine has room for, or than its nodes get as many of.
    """
    division, sharing = division_of(job), machines_sharing(job)
    asked, ranks = engines_of_a_machine(job), division.ranks_here
    if not here or (device == "cpu" and asked == "auto" and ranks == 1):
        return sharing * (1 if asked == "auto" else asked), ()
    gpus = usable_gpus() if device == "cuda" else []
    fitting = len(gpus) // ranks if device == "cuda" else 1
    wanted = max(1, fitting) if asked == "auto" else asked
    room = len(gpus) if device == "cuda" else _most_threads(_chosen(job.engine.threads))
    if wanted * ranks > max(1, room):
        what, each = "GPUs" if device == "cuda" else "cores", f" of {ranks} ranks each" if ranks > 1 else ""
        key = "data_parallel" if wanted > 1 or ranks == 1 else _first_parallel(job)
        who = f"{wanted} engines{each} need" if wanted > 1 or ranks == 1 else f"{ranks} ranks need"
        text = (
            f"{who} {wanted * ranks} {what}, but this process may use only {room}; lower it, or leave it out"
        )
        raise JobFileError(str(job.source), [Mistake(f"engine.{key}", text)])
    if wanted > 1 and device == "cuda" and job.engine.deterministic and several_kinds():
        text = (
            "with engine.deterministic all engines need GPUs of one kind, but this process may use several; unset "
            "CUDA_VISIBLE_DEVICES (then all GPUs of the first one's kind are used), or set engine.data_parallel: 1"
        )
        raise JobFileError(str(job.source), [Mistake("engine.data_parallel", text)])
    return sharing * wanted, tuple(gpus[: wanted * ranks]) if wanted * ranks > 1 else ()


def division_of(job: Job) -> Division:
    """Return how the job divides its model among ranks."""
    engine = job.engine
    machines = engine.machines if engine.spans_machines else 1
    return Division(
        engine.tensor_parallel_size, engine.pipeline_parallel_size, machines, engine.expert_parallel_size
    )


def machines_sharing(job: Job) -> int:
    """Return how many machines have engines of their own."""
    return 1 if job.engine.spans_machines else job.engine.machines


def engines_of_a_machine(job: Job) -> int | Literal["auto"]:
    """Return how many engines each machine has. Raises JobFileError where they are not as many on each."""
    asked, machines = job.engine.data_parallel, machines_sharing(job)
    if asked == "auto":
        return asked
    if asked % machines:
        text = (
            f"{asked} engine{'s' if asked > 1 else ''} cannot be shared out among {machines} machines, this one and "
            f"engine.nodes.count others; use a multiple of {machines}, or leave it out. One engine is divided among "
            f"them by a multiple of {machines} as engine.pipeline_parallel_size"
        )
        raise JobFileError(str(job.source), [Mistake("engine.data_parallel", text)])
    return asked // machines


def _first_parallel(job: Job) -> str:
    kinds = ("tensor_parallel_size", "expert_parallel_size")
    return next((kind for kind in kinds if getattr(job.engine, kind) > 1), "pipeline_parallel_size")


def _refuse_division(job: Job, checkpoint: StoredModel, device: Device, quantization: Quantization) -> None:
    """Raise Unavailable for a division that keeps no bits where they are promised, or that cannot be."""
    division = division_of(job)
    if division.ranks > 1 and not isinstance(checkpoint, Checkpoint):
        raise CannotSplit("a model that transformers' code computes is not divided among ranks")
    if division.ranks > 1 and isinstance(checkpoint, Checkpoint):
        check_division(checkpoint.spec.quantized(quantization).caching(job.model.kv_cache_dtype), division)
    if division.machines > 1 and device == "cuda":
        raise CannotSplit(
            "engine.pipeline_parallel_size: one engine is divided among GPUs of one machine alone as yet; leave "
            "engine.nodes out, or the sizes of each engine within a machine"
        )
    if job.engine.deterministic and job.engine.tensor_parallel_size > 1:
        raise Unavailable(
            "engine.deterministic promises the bits of one process, and ranks that compute each layer together "
            "(engine.tensor_parallel_size) add up in another order; engine.pipeline_parallel_size and "
            "engine.expert_parallel_size keep the bits"
        )


def thread_shares(threads: int | None, engines: int) -> list[int]:
    """CPU threads of each engine; None: as many as there are cores."""
    most = _most_threads(threads)
    return [max(1, most * (engine + 1) // engines - most * engine // engines) for engine in range(engines)]


def _most_threads(threads: int | None) -> int:
    usable = usable_cpus()
    return min(threads or usable, usable)


def _has_experts(checkpoint: StoredModel) -> bool:
    return isinstance(checkpoint, Checkpoint) and any(each.experts for each in checkpoint.spec.linears())


def _mistakes(job: Job, checkpoint: StoredModel, device: Device, dtype: Dtype) -> Iterator[Mistake]:
    """Yield what neither checkpoint nor device can do. A CPU that the job names was refused with the job file; here
    it is one that `auto` has found."""
    yield from _wrong_for_encoders(job, checkpoint)
    asked, length = job.model.quantization, job.model.max_model_len
    positions, cpu = checkpoint.spec.max_positions, device == "cpu"
    if length is not None and length > positions:
        text = (
            f"{length} is more than the {positions} positions that the checkpoint was made for; leave it out"
        )
        yield Mistake("model.max_model_len", text)
    if cpu and job.model.kv_cache_dtype == "fp8":
        text = "only a GPU can read and write it, and device: auto means the CPU here; use int8"
        yield Mistake("model.kv_cache_dtype", f"fp8: {text}")
    fp8 = cpu and (asked == "fp8" or (asked == "stored" and checkpoint.stored_quantization == "stored"))
    if fp8:
        text = "only a GPU can multiply in fp8, and device: auto means the CPU here; use int8"
        yield Mistake("model.quantization", f"{asked}: {text}")
    if cpu and dtype == "float16":
        text = (
            "not available in float16 on a CPU, which device: auto means here; use dtype: bfloat16 or float32"
        )
        if job.model.kv_cache_dtype == "int8":
            yield Mistake("model.kv_cache_dtype", f"int8 is {text}, or leave it out")
        if asked not in ("auto", "none") and not fp8:
            yield Mistake("model.quantization", f"{asked} is {text}, or leave it out")
        if job.engine.deterministic:
            yield Mistake("engine.deterministic", f"true is {text}, or leave it out")
    sparse = asked == "stored" and checkpoint.stored_quantization == "stored-sparse"
    if sparse and (cpu or dtype == "float32" or job.engine.deterministic):
        text = (
            "only a GPU can leave out the zeros of 2:4 sparse weights, in bfloat16 and float16, and not with "
            "engine.deterministic; leave it out"
        )
        yield Mistake("model.quantization", f"stored: {text}")
    if asked == "stored" and checkpoint.stored_quantization == "none":
        text = "the checkpoint stores no weights that can be multiplied as they are (docs/models.md); leave it out"
        yield Mistake("model.quantization", f"stored: {text}")
    quantized, coded_cache = asked not in ("auto", "none"), job.model.kv_cache_dtype != "auto"
    refused = checkpoint.refusals(quantized, job.engine.deterministic, coded_cache)
    yield from (Mistake(key, text) for key, text in refused)


def _wrong_for_encoders(job: Job, checkpoint: StoredModel) -> Iterator[Mistake]:
    """Yield what an encoder cannot do."""
    if not isinstance(checkpoint, Checkpoint) or checkpoint.spec.causal:
        if job.rerank.document is not None:
            text = "is for cross-encoders, and the checkpoint is a decoder, whose prompts hold query and document"
            yield Mistake("rerank.document", f"{text}; put it in prompt.user")
        return
    spec = checkpoint.spec
    if job.task == "rerank":
        yield from pair_mistakes(job, spec)
    elif job.task != "embed":
        text = f"the checkpoint is an encoder (model_type {spec.family}), which generates no texts"
        yield Mistake("task", f"{job.task}: {text}; use task: embed, or another model")


def auto_dtype(device: Device, stored: Dtype, fast_bf16: bool) -> Dtype:
    """Return the dtype of the checkpoint where the device is fast in it; a CPU without fast bfloat16 runs float32."""
    if device == "cuda" or stored == "float32":
        return stored
    return "bfloat16" if fast_bf16 else "float32"


def resolved_quantization(
    asked: AskedQuantization, checkpoint: StoredModel, hardware: Hardware, dtype: Dtype, here: bool = True
) -> Quantization:
    """Return how weights are quantised. auto: as the checkpoint stores them, if the device multiplies them so, and in
    int4 only where that is asked for; else not at all.

    `here`: whether the hardware is this machine's.
    """
    stored = checkpoint.stored_quantization
    if asked == "stored":
        return stored
    if asked != "auto":
        return asked
    if stored == "stored-int4":
        return "none"
    if stored == "stored-sparse":
        return stored if hardware.device == "cuda" and dtype != "float32" else "none"
    if stored in ("stored-int8", "stored-mxfp4"):
        return stored if hardware.device == "cuda" or dtype != "float16" else "none"
    return stored if multiplies_fp8(hardware, here) else "none"


def runs_in_tiles(device: Device) -> bool:
    """Whether the operators will compute in the CPU's matrix tiles: where the system grants them."""
    return device == "cpu" and tile_grant().given


def _device() -> Device:
    """A GPU counts only with a torch that can use it; its CPU build says so in its version."""
    can = not version("torch").endswith("+cpu")
    return "cuda" if can and nvidia_gpus() else "cpu"


def _chosen(value: int | Literal["auto"]) -> int | None:
    return None if value == "auto" else value
