"""The harness of all measurements: sections are declared, measured in a process of their own, recorded and printed."""
