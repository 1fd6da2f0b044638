"""Drafts: tokens that are likely to follow, verified many at a time, and how many of them it pays to verify."""
