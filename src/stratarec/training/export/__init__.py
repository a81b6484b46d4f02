"""A trained model for use elsewhere."""
