"""An engine is loaded here: its model, operators and memory."""
