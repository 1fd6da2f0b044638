"""This computer: its cores, memory, peaks and energy, and the processes that are started on it."""
