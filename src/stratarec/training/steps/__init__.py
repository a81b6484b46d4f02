"""A training step and its stages, and the state and decisions that depend on steps."""
