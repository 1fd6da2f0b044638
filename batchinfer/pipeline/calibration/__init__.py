"""The calibration of a job's weights for int4. Only a job that calibrates imports these modules."""
