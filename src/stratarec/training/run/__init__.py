"""A run's directory, and the model that it ended with."""
