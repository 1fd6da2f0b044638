"""Engines on a Ray cluster. Only jobs with `ray.address` import these modules, and only they import ray."""
