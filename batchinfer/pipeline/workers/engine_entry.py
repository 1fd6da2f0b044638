"""The names by which an engine's process is started. Nothing is imported here: the command needs them first of all."""

WORKER = "batchinfer.pipeline.workers.worker:main"
RANK = "batchinfer.pipeline.workers.ranks.process:main"
ENGINE = "batchinfer.engine.load.build:load_weights"  # "module:function" that loads an engine's weights
