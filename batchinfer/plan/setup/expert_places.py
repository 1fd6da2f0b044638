"""Plans the placement of experts on the ranks of a job's engines."""

from __future__ import annotations

from batchinfer.core.hub import describe_model
from batchinfer.engine.ranks.shards import expert_ranks, rank_shard
from batchinfer.job import Job
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.opening import StoredModel
from batchinfer.models.parallel.shard_spec import shard_spec
from batchinfer.models.spec.model_cost import loaded_bytes
from batchinfer.models.spec.parameters import parameter_count
from batchinfer.models.spec.spec import ModelSpec
from batchinfer.plan.expert_plan import ExpertPlan, has_experts, plan_experts
from batchinfer.plan.setup.setting import Setting
from batchinfer.report.tables.earlier_runs import earlier_experts
from batchinfer.report.tables.folder import report_folder

# Share of the memory after weights that copies of experts may take. The rest is for the KV cache.
COPIES_SHARE = 0.1


def expert_plan(job: Job, checkpoint: StoredModel, setting: Setting) -> ExpertPlan | None:
    """Assign the experts of the job's model to ranks, by the loads that earlier runs measured.

    Returns None if the model has no experts or whole experts are not divided among ranks. Without measured loads, or if
    the job says so, each rank gets a contiguous range of experts.

    Args:
        job: The job.
        checkpoint: The job's model.
        setting: The job's device, arithmetic, memory and parallelism.
    """
    division = setting.placement.division
    if division.ranks == 1 or not isinstance(checkpoint, Checkpoint):
        return None
    spec = checkpoint.spec.quantized(setting.numerics.quantization)
    ranks = expert_ranks(spec, division)
    if ranks == 1:
        return None
    if job.engine.expert_placement == "ranges":
        return ExpertPlan(ranks, "engine.expert_placement says so")
    loads = earlier_experts(report_folder(job.results_root), describe_model(job.model.path))
    if loads is None or not has_experts(spec, loads):
        return ExpertPlan(ranks, "no earlier run has measured how many tokens each gets")
    peaks = None if setting.peaks is None else setting.peaks.part(division.ranks)
    spare = int(COPIES_SHARE * _free_bytes(spec, setting))
    return plan_experts(spec, ranks, loads, peaks, setting.numerics.itemsize, spare)


def _free_bytes(spec: ModelSpec, setting: Setting) -> int:
    placement = setting.placement
    division, memory = placement.division, placement.hardware.memory_bytes or 0
    if setting.device == "cpu":
        memory = placement.free_memory // placement.processes_here
    firsts = range(0, division.ranks, division.peers)
    owns = [shard_spec(spec, rank_shard(rank, division, spec)) for rank in firsts]
    itemsize = setting.numerics.itemsize
    return memory - max(loaded_bytes(own, parameter_count(own), itemsize) for own in owns)
