"""Models whose features are in towers."""
