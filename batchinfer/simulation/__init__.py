"""What a job will do, step by step, without its model: the engine itself, on a runner that only counts."""
