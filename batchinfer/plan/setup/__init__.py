"""The setup of a job on this machine."""
