"""The offer of a node: what it gives to the processes that a run has on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchinfer.core.errors import Unavailable
from batchinfer.engine.config import EngineConfig
from batchinfer.machine.cpus import divided_cores, usable_cpus
from batchinfer.machine.hardware import nvidia_gpus, usable_gpus
from batchinfer.pipeline.workers.engine_entry import ENGINE
from batchinfer.pipeline.workers.messages import EnginePlace, WorkerSpec
from batchinfer.plan.setup.placement import thread_shares


@dataclass(frozen=True, slots=True)
class NodeOffer:
    """The machine of a node. `memory`: bytes that were free before any engine was started; `factory`: the only one that
    makes engines here, as no run may name another."""

    name: str
    memory: int
    factory: str = ENGINE

    def placed(self, spec: WorkerSpec) -> WorkerSpec:
        """Return how an engine, or a rank, and those that it starts are loaded here. Raises Unavailable where this
        machine has too few cores or GPUs for its part."""
        others = tuple(self._placed_one(other) for other in spec.others)
        return replace(self._placed_one(spec), others=others)

    def _placed_one(self, spec: WorkerSpec) -> WorkerSpec:
        part, parts = spec.place.part
        if parts == 1:
            return replace(spec, place=EnginePlace())
        place = self._gpu(part, parts) if spec.load.device == "cuda" else self._cores(part, parts)
        threads = thread_shares(spec.load.threads, parts, usable_cpus())[part]
        return replace(spec, place=place, load=replace(spec.load, threads=threads))

    def _gpu(self, part: int, parts: int) -> EnginePlace:
        gpus = usable_gpus(nvidia_gpus())
        if len(gpus) < parts:
            raise Unavailable(f"{self.name} has {len(gpus)} GPUs, and is to run {parts} processes")
        return EnginePlace(gpu=gpus[part])

    def _cores(self, part: int, parts: int) -> EnginePlace:
        if usable_cpus() < parts:
            raise Unavailable(f"{self.name} has {usable_cpus()} cores, and is to run {parts} processes")
        return EnginePlace(divided_cores(parts)[part])

    def configured(self, config: EngineConfig, spec: WorkerSpec) -> EngineConfig:
        """Return the configuration of an engine with its part of this machine's memory, where several share it."""
        if config.memory is None:
            return config
        return replace(config, memory=self.memory * (1 + len(spec.others)) // spec.place.part[1])
