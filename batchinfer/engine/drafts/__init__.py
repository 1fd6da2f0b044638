"""Draft tokens: the sources that propose them, and the choice of how many to verify."""
