"""What answers have to follow: schemas, patterns, grammars."""
