"""Tables in checkpoints."""
