"""A training step and its parts, and the state and decisions that depend on steps."""
