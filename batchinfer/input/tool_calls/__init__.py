"""Tool calls in answers: the syntaxes of checkpoints, their parsers, and grammars that constrain answers to calls."""
