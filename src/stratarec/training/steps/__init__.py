"""A step, its stages, and what decides between two of them."""
