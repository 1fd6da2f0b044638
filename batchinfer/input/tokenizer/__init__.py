"""The tokenizer of a checkpoint: encodes texts to token ids and decodes them."""
