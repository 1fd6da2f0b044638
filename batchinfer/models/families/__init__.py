"""The families of models: one file each, from a config.json and a checkpoint's tensor names to a ModelSpec."""
