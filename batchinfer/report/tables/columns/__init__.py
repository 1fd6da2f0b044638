"""The columns of the report's tables: the type, the unit, the meaning of each, and how it is made."""
