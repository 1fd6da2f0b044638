"""Requests, sampling parameters, errors and other types that all rooms use. Imports only numpy."""
