"""Values in job files and rows that need parsing."""
