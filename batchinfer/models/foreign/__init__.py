"""Decoders that are no family of ours: transformers' modelling code over our paged cache and attention."""
