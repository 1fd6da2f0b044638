"""Pure planning: the index in, an ordered Plan and its forecast out. No torch, no model."""
