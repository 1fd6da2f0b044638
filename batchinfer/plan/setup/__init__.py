"""What a job means on this machine."""
