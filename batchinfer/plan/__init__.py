"""What a job will do: order, setup, simulation, forecast."""
