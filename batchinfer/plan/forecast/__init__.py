"""What a run will take: tokens, time, memory."""
