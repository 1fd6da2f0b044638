"""The version of this package, in a module of its own to avoid importing the package."""

__version__ = "0.1.0"
