"""Patterns of schemas and jobs, read as ECMAScript reads them."""
