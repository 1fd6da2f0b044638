"""The version of this package, here so that no module has to import the package itself for it."""

__version__ = "0.1.0"
