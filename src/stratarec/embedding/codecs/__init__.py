"""A row's bytes at rest: encoded weights, quantisation parameters and optimizer state."""
