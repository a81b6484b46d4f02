"""A file a paper."""
