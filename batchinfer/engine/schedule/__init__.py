"""The scheduler: sequences, blocks and the plan of each step. Free of torch."""
