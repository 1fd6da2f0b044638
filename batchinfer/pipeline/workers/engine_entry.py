"""Names of the functions that run in an engine's processes. Imports nothing, because it is needed before all else."""

WORKER = "batchinfer.pipeline.workers.worker:main"
RANK = "batchinfer.pipeline.workers.ranks.process:main"
ENGINE = "batchinfer.engine.load.build:load_weights"  # "module:function" that loads an engine's weights
