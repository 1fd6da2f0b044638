"""Forecasts of a run: tokens, time and memory."""
