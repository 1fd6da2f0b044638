"""What every other room speaks of. Imports nothing of ours."""
