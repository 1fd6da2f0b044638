"""`batchinfer bench`: runs reproducible workloads and compares them with the limits of the hardware."""
