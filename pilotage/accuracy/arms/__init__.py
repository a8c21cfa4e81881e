"""Arms: everything that can be asked for the logits of a token stream."""
