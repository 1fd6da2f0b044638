"""The answers of a result are held against the values that its input says are right."""
