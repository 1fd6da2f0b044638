"""A job's plan: its order, setup, simulation and forecast."""
