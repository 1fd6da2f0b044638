"""`batchinfer bench`: workloads that anyone can run again, and how near to the hardware's limit they came."""
