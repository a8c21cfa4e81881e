"""Training: the same definition, sharded, checkpointed and resumed."""
