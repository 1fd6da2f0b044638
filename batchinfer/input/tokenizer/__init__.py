"""A checkpoint's tokenizer: texts to token ids and back."""
