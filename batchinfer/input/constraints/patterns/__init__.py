"""Regular expressions of schemas and jobs, in ECMAScript's syntax."""
