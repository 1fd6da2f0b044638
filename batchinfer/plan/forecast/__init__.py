"""The forecast of a run: tokens, time, memory."""
