"""Errors, requests, wording and the version, which every other room uses. The room imports numpy only."""
