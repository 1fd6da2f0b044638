"""Regular expressions as ECMAScript reads them with its flag u: translated for llguidance's engine, and measured."""
