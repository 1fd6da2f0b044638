"""The formats of input files, each with its reader."""
