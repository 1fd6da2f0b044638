"""The report of a run: its work, time, cost and hardware efficiency. Does not import torch."""
