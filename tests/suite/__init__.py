"""The harness of all measurements: sections are declared, measured in separate processes, recorded and printed."""
