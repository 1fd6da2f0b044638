"""The measurements of speed and memory that are no tests: `python -m tests.speed --help` lists them."""
